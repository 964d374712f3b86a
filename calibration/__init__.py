"""Calibration: what is measured once for a model and read when it is served."""
