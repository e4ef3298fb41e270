"""The dialects of the gateway: requests read and answers written as OpenAI's API has them."""
