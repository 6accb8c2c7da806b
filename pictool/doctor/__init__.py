"""Whether linking works here: what is installed, the exactness rules on one model and device, what answers lose."""
