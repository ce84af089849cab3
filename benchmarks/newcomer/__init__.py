"""From an empty machine to a trained model of one's own: minutes and commands here, and by Flower's quickstart."""
