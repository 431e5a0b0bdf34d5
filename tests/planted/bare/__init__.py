"""Programs of torch alone that show planted defects."""
