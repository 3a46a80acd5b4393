"""Where models keep the tables of their words."""

import pytest
from torch import nn

from wellcond.init.tokens import embedding_layers


@pytest.mark.parametrize("name", ["wte", "tok_embeddings", "token_embedding", "embed_tokens", "word_embeddings"])
def test_a_table_of_words_is_known_by_its_name_and_positions_are_none(name):
    model = nn.ModuleDict({name: nn.Embedding(5, 4), "wpe": nn.Embedding(3, 4), "head": nn.Linear(4, 5)})
    assert [found for found, _ in embedding_layers(model)] == [name]
