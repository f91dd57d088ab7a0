"""Scripts for maintainers of this repository; the wheel does not contain them."""
