"""What a reinforcement-learning trainer calls: tasks, groups and rewards around the engine."""
