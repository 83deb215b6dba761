"""Behind data sets of torch's: does what torch's DataLoader does, as torch does it, and economic mode."""
