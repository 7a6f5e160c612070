"""What the claims come from: comparisons, measurements, their results, and the figures of these."""
