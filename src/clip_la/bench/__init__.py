"""Time, memory and error of attention, alone and in whole models: `clip-la bench`."""
