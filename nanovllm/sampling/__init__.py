"""What greedy and temperature leave out: filters, penalties, log-probabilities, stop strings, constrained output.

row.py and step.py run beside the scheduler and know no torch; device.py runs on every rank.
"""
