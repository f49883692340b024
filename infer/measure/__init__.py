"""How fast is it, and which tree is fastest?"""
