"""What a run does when something goes wrong around it: signals, crashed and hung ranks, numbers that blow up."""
