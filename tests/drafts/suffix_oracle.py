"""Suffix decoding by its definition: every place of every text is looked at. Quadratic."""


def agreeing(context: list[int], text: list[int], end: int) -> int:
    """How many tokens before `end` are the last ones of the context."""
    count = 0
    while count < min(end, len(context)) and text[end - 1 - count] == context[-1 - count]:
        count += 1
    return count


def guess(context, texts, most, sizes=(4, 2, 1), max_match=32, factor=1.0, offset=0.0, floor=0.1):
    """(tokens, claims, match) after `context`; `texts` from the oldest to the newest."""
    context = context[-max_match:]
    places = [(t, end) for t, text in enumerate(texts) for end in range(1, len(text))]
    matches = {place: agreeing(context, texts[place[0]], place[1]) for place in places}
    size = next((s for s in sizes if any(match >= s for match in matches.values())), None)
    if size is None:
        return [], [], 0
    recent = [place for place in places if matches[place] >= size][-12:]
    longest = max(matches[place] for place in recent)
    live = [place for place in recent if matches[place] == longest]
    tokens, claims, path = [], [], 1.0
    while live and len(tokens) < min(most, int(longest * factor + offset + 1e-6)):
        next_tokens = [texts[t][end] for t, end in live]
        newest_first = list(dict.fromkeys(reversed(next_tokens)))
        token = max(newest_first, key=next_tokens.count)
        claim = next_tokens.count(token) / len(live)
        path *= claim
        if path < floor:
            break
        tokens.append(token)
        claims.append(claim)
        live = [(t, end + 1) for t, end in live if texts[t][end] == token]
        live = [(t, end) for t, end in live if end < len(texts[t])]
    return tokens, claims, longest
