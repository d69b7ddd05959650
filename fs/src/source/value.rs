//! Values of options: how the text after `=` is read, and the setting that it changes.

use std::time::Duration;

use super::{SourceOpenError, SourceResult};

/// One word of a [`OptionValue::Choice`], with its effect.
pub type ChoiceWord<S> = (&'static str, fn(&mut S));

/// The form of the text after `=`, with the effect on settings of type `S`.
pub enum OptionValue<S: 'static> {
    /// No value.
    Flag(fn(&mut S)),
    /// A decimal number between the two limits, both included.
    Number(u64, u64, fn(&mut S, u64)),
    /// A number of bytes between the two limits, both included; see [`bytes`] for the units.
    Size(u64, u64, fn(&mut S, u64)),
    /// An octal number up to the limit, included.
    Octal(u32, fn(&mut S, u32)),
    /// Seconds, see [`seconds`].
    Seconds(fn(&mut S, Duration)),
    /// One of these words. If the empty word is among them, the option may come without `=`.
    Choice(&'static [ChoiceWord<S>]),
    /// Text in a form of its own, with its description for an error message. The function returns
    /// `None` for any other form.
    Text(&'static str, &'static str, fn(&mut S, &str) -> Option<()>),
}

use OptionValue::{Choice, Flag, Number, Octal, Seconds, Size, Text};

impl<S> OptionValue<S> {
    /// The value in help texts; `None` for a flag.
    pub fn form(&self) -> Option<String> {
        match self {
            Flag(_) => None,
            Number(..) => Some("N".to_owned()),
            Size(..) => Some("BYTES".to_owned()),
            Octal(..) => Some("OCTAL".to_owned()),
            Seconds(_) => Some("SECS".to_owned()),
            Choice(words) => {
                let words = words.iter().map(|(word, _)| *word).filter(|word| !word.is_empty());
                Some(words.collect::<Vec<_>>().join("|"))
            }
            Text(form, ..) => Some((*form).to_owned()),
        }
    }

    /// A description of the right values, for an error message.
    fn describe_expected(&self) -> String {
        match self {
            Number(min, max, _) => range("a number", *min, *max),
            Size(min, max, _) => range("bytes (also 64K, 1M, 2G)", *min, *max),
            Octal(max, _) => format!("an octal number up to {max:o}"),
            Seconds(_) => "seconds, such as 1 or 0.5".to_owned(),
            Choice(_) => format!("one of {}", self.form().unwrap_or_default()),
            Text(_, expected, _) => (*expected).to_owned(),
            Flag(_) => String::new(),
        }
    }

    /// Applies the option `name` with its value, `None` when the option came without `=`.
    ///
    /// # Errors
    ///
    /// [`SourceOpenError::Usage`] for a missing value, a superfluous one, and one of the wrong form
    /// or range.
    pub fn apply(&self, settings: &mut S, name: &str, value: Option<&str>) -> SourceResult {
        match (self, value) {
            (Flag(set), None) => {
                set(settings);
                return Ok(());
            }
            (Choice(words), None) if words.iter().any(|(word, _)| word.is_empty()) => {
                return self.apply(settings, name, Some(""));
            }
            (Flag(_), Some(_)) => {
                return Err(SourceOpenError::Usage(format!(
                    "option {name} takes no value: write just {name}"
                )));
            }
            (_, None) => {
                let form = self.form().unwrap_or_default();
                return Err(SourceOpenError::Usage(format!(
                    "option {name} needs a value: write {name}={form}"
                )));
            }
            (_, Some(_)) => {}
        }
        let value = value.unwrap_or_default();
        self.apply_value(settings, value).ok_or_else(|| {
            let expected = self.describe_expected();
            SourceOpenError::Usage(format!(
                "option {name}={value} is not possible: write {expected}"
            ))
        })
    }

    /// `None` when the value has the wrong form or range.
    fn apply_value(&self, settings: &mut S, value: &str) -> Option<()> {
        let within = |min: u64, max: u64| move |n: &u64| (min..=max).contains(n);
        match self {
            Number(min, max, set) => set(settings, decimal(value).filter(within(*min, *max))?),
            Size(min, max, set) => set(settings, bytes(value).filter(within(*min, *max))?),
            Octal(max, set) => {
                set(settings, u32::from_str_radix(value, 8).ok().filter(|n| n <= max)?);
            }
            Seconds(set) => set(settings, seconds(value)?),
            Choice(words) => words.iter().find(|(word, _)| *word == value)?.1(settings),
            Text(_, _, set) => set(settings, value)?,
            Flag(_) => return None,
        }
        Some(())
    }
}

fn range(what: &str, min: u64, max: u64) -> String {
    match max {
        u64::MAX if min == 0 => what.to_owned(),
        u64::MAX => format!("{what}, at least {min}"),
        _ => format!("{what} from {min} to {max}"),
    }
}

/// Only digits: `parse` would also accept a plus sign.
fn decimal(text: &str) -> Option<u64> {
    text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().ok())?
}

/// Parses a number of bytes with a unit K, M, G or T (powers of 1024), or without one.
pub fn bytes(text: &str) -> Option<u64> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let shift = match text[digits.len()..].to_ascii_lowercase().as_str() {
        "" => 0,
        "k" | "kib" => 10,
        "m" | "mib" => 20,
        "g" | "gib" => 30,
        "t" | "tib" => 40,
        _ => return None,
    };
    decimal(digits)?.checked_mul(1 << shift)
}

/// Parses seconds with a decimal fraction, up to a century, so that no sum of times can overflow.
pub fn seconds(text: &str) -> Option<Duration> {
    let plain = text.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.');
    let seconds: f64 = text.parse().ok().filter(|_| plain)?;
    (seconds <= 3.2e9).then(|| Duration::from_secs_f64(seconds))
}
