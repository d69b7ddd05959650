//! Rust source without comments and strings, enough to look for words in it.

/// The text of a file with comments, strings and characters replaced by spaces. Lines and columns
/// are unchanged.
pub fn code_only(text: &str) -> String {
    let bytes = text.as_bytes();
    let mut out = bytes.to_vec();
    let mut at = 0;
    while at < bytes.len() {
        let end = end_of_token(bytes, at);
        if end > at {
            out[at..end].iter_mut().filter(|byte| **byte != b'\n').for_each(|byte| *byte = b' ');
        }
        at = end.max(at + 1);
    }
    String::from_utf8_lossy(&out).into_owned()
}

/// The end of the comment, string or character that begins at `at`; `at` if none begins there.
fn end_of_token(bytes: &[u8], at: usize) -> usize {
    let rest = &bytes[at..];
    if rest.starts_with(b"//") {
        return at + rest.iter().position(|&byte| byte == b'\n').unwrap_or(rest.len());
    }
    if rest.starts_with(b"/*") {
        return at + end_of_block_comment(rest);
    }
    let in_word = at > 0 && (bytes[at - 1].is_ascii_alphanumeric() || bytes[at - 1] == b'_');
    if let Some(hashes) = raw_string(rest).filter(|_| !in_word) {
        let close = [b"\"".as_slice(), &vec![b'#'; hashes]].concat();
        let open = rest.iter().position(|&byte| byte == b'"').unwrap_or(0) + 1;
        let length = rest[open..].windows(close.len()).position(|window| window == close);
        return at + length.map_or(rest.len(), |length| open + length + close.len());
    }
    match rest[0] {
        b'"' => at + end_of_quoted(rest, b'"'),
        // A lifetime has no quote after its first character.
        b'\'' if rest.get(1) == Some(&b'\\') || rest.get(2) == Some(&b'\'') => {
            at + end_of_quoted(rest, b'\'')
        }
        _ => at,
    }
}

/// The number of hashes of a raw string that begins here.
fn raw_string(rest: &[u8]) -> Option<usize> {
    let rest = rest.strip_prefix(b"b").or(rest.strip_prefix(b"c")).unwrap_or(rest);
    let rest = rest.strip_prefix(b"r")?;
    let hashes = rest.iter().take_while(|&&byte| byte == b'#').count();
    (rest.get(hashes) == Some(&b'"')).then_some(hashes)
}

fn end_of_quoted(rest: &[u8], quote: u8) -> usize {
    let mut at = 1;
    while at < rest.len() && rest[at] != quote {
        at += if rest[at] == b'\\' { 2 } else { 1 };
    }
    (at + 1).min(rest.len())
}

fn end_of_block_comment(rest: &[u8]) -> usize {
    let (mut at, mut depth) = (2, 1);
    while at < rest.len() && depth > 0 {
        match rest[at..] {
            [b'/', b'*', ..] => (depth, at) = (depth + 1, at + 2),
            [b'*', b'/', ..] => (depth, at) = (depth - 1, at + 2),
            _ => at += 1,
        }
    }
    at
}

/// True if a line contains `word` as a whole word.
pub fn has_word(line: &str, word: &str) -> bool {
    let boundary = |c: char| !c.is_ascii_alphanumeric() && c != '_';
    line.split(boundary).any(|other| other == word)
}

#[test]
fn comments_and_strings_are_blanked() {
    let text = "a /* b /* c */ d */ e // f\n\"g \\\" h\" i r#\"j \" k\"# 'l' '\\'' &'m n b\"o\" p";
    let left: Vec<String> = code_only(text).split_whitespace().map(str::to_owned).collect();
    assert_eq!(left, ["a", "e", "i", "&'m", "n", "b", "p"]);
    assert!(has_word("pub unsafe fn", "unsafe") && !has_word("unsafe_code", "unsafe"));
}
