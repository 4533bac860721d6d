"""The memory of a rank: predicted from shapes, limited by the machine, and accounted for while a step runs."""
