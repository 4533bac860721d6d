"""What a run does when something goes wrong around it: signals, crashed, hung and slow ranks, numbers that blow up."""
