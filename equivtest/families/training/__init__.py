"""Steps of training a perceptron of two layers, parallel in several ways."""
