//! Untrusted text for a terminal or a log.
//!
//! Names of processes, mount points, sources, and messages of kernels and daemons may contain
//! control characters. They could make a terminal act or show something else, and split a line of a
//! log. All output goes through [`escape_controls`] or [`lines`].

use std::borrow::Cow;
use std::fmt::Write;

/// `text` with every control character escaped (`\n`, `\u001b`), on one line.
pub fn escape_controls(text: &str) -> Cow<'_, str> {
    escape(text, is_control)
}

/// [`escape_controls`] for text of several lines: line feeds and tabs stay. JSON stays JSON with
/// the same value.
pub fn lines(text: &str) -> Cow<'_, str> {
    escape(text, |c| is_control(c) && !matches!(c, '\n' | '\t'))
}

fn escape(text: &str, is_bad: impl Fn(char) -> bool) -> Cow<'_, str> {
    if !text.contains(&is_bad) {
        return Cow::Borrowed(text);
    }
    let mut escaped = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        match c {
            c if !is_bad(c) => escaped.push(c),
            '\n' => escaped.push_str("\\n"),
            '\t' => escaped.push_str("\\t"),
            '\r' => escaped.push_str("\\r"),
            // All of them have at most four hexadecimal digits, the form of JSON.
            c => {
                let _ = write!(escaped, "\\u{:04x}", u32::from(c));
            }
        }
    }
    Cow::Owned(escaped)
}

/// Control characters, and those that change the direction of text (Unicode, UAX 9) or may end a
/// line.
fn is_control(c: char) -> bool {
    let turns = matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}');
    c.is_control() || turns || matches!(c, '\u{2028}' | '\u{2029}' | '\u{2066}'..='\u{2069}')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_control_character_reaches_a_terminal() {
        let text = "a\u{1b}[2J\u{7}\u{9b}\u{7f}\r\n\t\u{202e}é\\";
        assert_eq!(escape_controls(text), r"a\u001b[2J\u0007\u009b\u007f\r\n\t\u202eé\");
        assert_eq!(lines("a\n\tb\u{1b}"), "a\n\tb\\u001b");
        assert!(matches!(escape_controls("plain: é"), Cow::Borrowed(_)));
    }

    #[test]
    fn escaped_json_has_the_same_value() {
        let text = serde_json::to_string("a\u{9b}\u{1b}\u{202e}").unwrap();
        let shown = lines(&text);
        assert_eq!(serde_json::from_str::<String>(&shown).unwrap(), "a\u{9b}\u{1b}\u{202e}");
        assert!(!shown.contains('\u{9b}'));
    }
}
