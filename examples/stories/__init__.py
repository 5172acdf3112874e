"""Four stories are streamed while the weights of the model that writes them change three times."""
