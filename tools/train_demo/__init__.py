"""The recipe of the small trained model that ships with the package."""
