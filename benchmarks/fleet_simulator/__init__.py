"""A fleet of replicas that no machine here can hold, simulated: `python -m benchmarks.fleet_simulator --help`."""
