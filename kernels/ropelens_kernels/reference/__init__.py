"""The definitions, in plain torch and any dtype; a kernel is only a faster copy of them."""
