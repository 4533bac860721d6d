"""The page of a run: its files read, its curves drawn, all in one HTML file without a network."""
