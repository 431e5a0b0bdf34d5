"""Family of cases that train a perceptron of two layers, made parallel in several ways."""
