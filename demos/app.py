"""What a Hugging Face Space runs: see README.md."""

from demos.chat import main


main()
