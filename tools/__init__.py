"""What one does with a run of pods.py: ask, show_rollouts, plot, memory. Each says --help."""
