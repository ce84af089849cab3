"""The procedures that deal examples: arrays in, arrays out. `tasks.partition` checks, chooses and sorts."""
