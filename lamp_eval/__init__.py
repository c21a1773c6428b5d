"""Does a small adapter trained on one person's own history make a model better for them?"""

__version__ = "0.1.0"
