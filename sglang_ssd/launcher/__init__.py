"""What stands between a command line and two running processes: arguments, refusals, placement, the summary."""
