"""From prompts to the tokens that heads learn from. Each module uses only those above it.

prompts       records of files, folders and Hub data sets as prompts or conversations
shards        documents as columns: token ids, and which spans of them the target wrote
answers       the folder of a distillation: manifest, lines of each process, shards
text_side     a target's tokenizer and end tokens, without its weights
conversation  one prompt while it is answered, turn by turn, until it is a record
distill       answers prompts into a folder, with the target in this process or another `Answerer`
server        an `Answerer` whose tokens come from OpenAI-compatible servers
imports       conversations that the target answered earlier, as such a folder

Training reads `answers` and `shards` alone.
"""
