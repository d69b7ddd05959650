//! The lexer: from text to tokens.

use super::SourcePosition;
use super::ast::StringPart;
use super::diagnostic::{LanguageError, LanguageResult};

/// A token of the language.
#[derive(Clone, Debug, PartialEq)]
pub enum LanguageToken {
    Word(String),
    Integer(i64),
    Variable(String),
    Quoted(Vec<StringPart>),
    Symbol(char),
    End,
}

impl LanguageToken {
    /// A description of the token for messages.
    pub fn describe(&self) -> String {
        match self {
            LanguageToken::Word(word) => format!("found `{word}`"),
            LanguageToken::Integer(number) => format!("found the number {number}"),
            LanguageToken::Variable(name) => format!("found the variable ${name}"),
            LanguageToken::Quoted(_) => "found a quoted string".into(),
            LanguageToken::Symbol(symbol) => format!("found `{symbol}`"),
            LanguageToken::End => "the file ends".into(),
        }
    }
}

/// All tokens of `text`, with `End` as the last.
pub fn tokens(text: &str) -> LanguageResult<Vec<(LanguageToken, SourcePosition)>> {
    let mut lexer = LanguageLexer {
        rest: text.chars().collect(),
        at: 0,
        place: SourcePosition { line: 1, column: 1 },
    };
    let mut found = Vec::new();
    loop {
        let (token, place) = lexer.next()?;
        let end = token == LanguageToken::End;
        found.push((token, place));
        if end {
            return Ok(found);
        }
    }
}

struct LanguageLexer {
    rest: Vec<char>,
    at: usize,
    place: SourcePosition,
}

impl LanguageLexer {
    fn peek(&self) -> Option<char> {
        self.rest.get(self.at).copied()
    }

    fn advance(&mut self) -> Option<char> {
        let next = self.peek()?;
        self.at += 1;
        if next == '\n' {
            self.place = SourcePosition { line: self.place.line + 1, column: 1 };
        } else {
            self.place.column += 1;
        }
        Some(next)
    }

    fn take_while(&mut self, wanted: impl Fn(char) -> bool) -> String {
        let mut text = String::new();
        while let Some(next) = self.peek().filter(|&next| wanted(next)) {
            text.push(next);
            self.advance();
        }
        text
    }

    fn skip_blanks(&mut self) {
        while let Some(next) = self.peek() {
            if next == '#' {
                self.take_while(|c| c != '\n');
            } else if next.is_whitespace() {
                self.advance();
            } else {
                return;
            }
        }
    }

    fn next(&mut self) -> LanguageResult<(LanguageToken, SourcePosition)> {
        self.skip_blanks();
        let place = self.place;
        let Some(first) = self.peek() else { return Ok((LanguageToken::End, place)) };
        let token = match first {
            '{' | '}' | '=' | ',' | '(' | ')' | '*' | '+' => {
                self.advance();
                LanguageToken::Symbol(first)
            }
            '"' => LanguageToken::Quoted(self.lex_quoted(place)?),
            '$' => LanguageToken::Variable(self.variable(place)?),
            '0'..='9' => self.number(place)?,
            '-' if self.rest.get(self.at + 1).is_some_and(char::is_ascii_digit) => {
                self.number(place)?
            }
            first if begins_word(first) => LanguageToken::Word(self.take_while(continues_word)),
            other => {
                return Err(LanguageError::new(
                    place,
                    format!("found the character {other:?}"),
                    "a word, a number, a $variable or a \"string\"",
                ));
            }
        };
        Ok((token, place))
    }

    fn number(&mut self, place: SourcePosition) -> LanguageResult<LanguageToken> {
        let negative = self.peek() == Some('-');
        if negative {
            self.advance();
        }
        let text = self.take_while(|c| c.is_alphanumeric() || c == '.' || c == '_');
        let digits = text.trim_end_matches(|c: char| !c.is_ascii_digit());
        let factor: Option<i64> = match &text[digits.len()..] {
            "" => Some(1),
            "k" | "K" => Some(1 << 10),
            "m" | "M" => Some(1 << 20),
            "g" | "G" => Some(1 << 30),
            "t" | "T" => Some(1 << 40),
            _ => None,
        };
        let value = digits.parse::<i64>().ok().zip(factor).and_then(|(n, f)| n.checked_mul(f));
        let value = value.ok_or_else(|| {
            let expected = "a whole number below 2^63, optionally with the suffix k, m, g or t";
            LanguageError::new(place, format!("found `{text}`"), expected)
        })?;
        Ok(LanguageToken::Integer(if negative { -value } else { value }))
    }

    /// `$name`, `$(name)` (of the environment) or `${name}` (of Filebench itself).
    fn variable(&mut self, place: SourcePosition) -> LanguageResult<String> {
        self.advance();
        let open = self.peek().filter(|c| matches!(c, '(' | '{'));
        if open.is_some() {
            self.advance();
        }
        let name = self.take_while(|c| c.is_ascii_alphanumeric() || c == '_');
        let close = match open {
            Some('(') => Some(')'),
            Some(_) => Some('}'),
            None => None,
        };
        let starts_well = name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_');
        if !starts_well || (close.is_some() && self.advance() != close) {
            let expected = "the name of a variable, such as $dir";
            return Err(LanguageError::new(place, "found `$` and no name", expected));
        }
        match open {
            Some('(') => Ok(format!("({name})")),
            Some(_) => Err(LanguageError::new(
                place,
                format!("found the internal variable ${{{name}}} of Filebench"),
                "a variable that the file sets, or $(NAME) for one of the environment",
            )),
            None => Ok(name),
        }
    }

    fn lex_quoted(&mut self, place: SourcePosition) -> LanguageResult<Vec<StringPart>> {
        self.advance();
        let (mut parts, mut text) = (Vec::new(), String::new());
        loop {
            let here = self.place;
            match self.peek() {
                None => {
                    return Err(LanguageError::new(
                        place,
                        "the string never ends",
                        "`\"` at its end",
                    ));
                }
                Some('"') => {
                    self.advance();
                    break;
                }
                Some('$') => {
                    let name = self.variable(here)?;
                    parts.push(StringPart::Text(std::mem::take(&mut text)));
                    parts.push(StringPart::Variable(name, here));
                }
                Some('\\') => {
                    self.advance();
                    match self.advance() {
                        Some('n') => text.push('\n'),
                        Some('t') => text.push('\t'),
                        Some(other) => text.push(other),
                        None => {}
                    }
                }
                Some(other) => {
                    text.push(other);
                    self.advance();
                }
            }
        }
        parts.push(StringPart::Text(text));
        parts.retain(|part| *part != StringPart::Text(String::new()));
        Ok(parts)
    }
}

fn begins_word(c: char) -> bool {
    c.is_alphabetic() || matches!(c, '/' | '_' | '.' | '-')
}

fn continues_word(c: char) -> bool {
    c.is_alphanumeric() || matches!(c, '/' | '_' | '.' | '-' | ':' | ';' | '+' | '@' | '%')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lex_only(text: &str) -> Vec<LanguageToken> {
        tokens(text).unwrap().into_iter().map(|(token, _)| token).collect()
    }

    #[test]
    fn suffixes_are_powers_of_two() {
        let expected = [1i64, 1024, 2 << 20, 3 << 30, -10, 8];
        let found = lex_only("1 1k 2m 3g -10 08");
        for (token, number) in found.iter().zip(expected) {
            assert_eq!(*token, LanguageToken::Integer(number));
        }
    }

    #[test]
    fn invalid_numbers_are_refused() {
        for text in ["1x", "1.5", "9999999999999999999", "9223372036854775807k", "1kk"] {
            assert!(tokens(text).is_err(), "{text}");
        }
    }

    #[test]
    fn comments_end_with_their_line_and_places_are_counted() {
        let found = tokens("# a comment\n  run 60 # another\n").unwrap();
        assert_eq!(
            found[0],
            (LanguageToken::Word("run".into()), SourcePosition { line: 2, column: 3 })
        );
        assert_eq!(found[1], (LanguageToken::Integer(60), SourcePosition { line: 2, column: 7 }));
        assert_eq!(found.len(), 3);
    }

    #[test]
    fn strings_hold_variables_and_escapes() {
        let found = lex_only(r#""a $b-\"\$c\n" "" "#);
        let LanguageToken::Quoted(parts) = &found[0] else { panic!() };
        assert_eq!(parts[0], StringPart::Text("a ".into()));
        assert!(matches!(&parts[1], StringPart::Variable(name, _) if name == "b"));
        assert_eq!(parts[2], StringPart::Text("-\"$c\n".into()));
        assert_eq!(found[1], LanguageToken::Quoted(vec![]));
        assert_eq!(lex_only("$(HOME)")[0], LanguageToken::Variable("(HOME)".into()));
        assert!(tokens("\"abc").is_err() && tokens("$").is_err() && tokens("${date}").is_err());
    }
}
