"""Four stories, told while the weights of the model that tells them change three times."""
