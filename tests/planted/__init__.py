"""Wrong operators and wrong rules of training, to plant in torch. `bare` has a program of torch alone for each."""
