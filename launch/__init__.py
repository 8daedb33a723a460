"""The launcher (``python -m launch``), and the programs that it starts: training, the demo, lessons."""
