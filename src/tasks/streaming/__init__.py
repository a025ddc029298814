"""Language modelling on text that is read while training, from one dataset or several."""
