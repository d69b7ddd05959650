//! Converts attributes to values of their types.

use std::sync::Arc;

use super::variables::{Known, Variables};
use crate::lang::Position;
use crate::lang::ast::Attribute;
use crate::lang::diagnostic::Mistake;
use crate::random::{Amount, RandomVariable};

type Result<T> = std::result::Result<T, Mistake>;

/// The attributes of one statement, and the variables that they refer to.
pub(super) struct Attributes<'a> {
    pub list: &'a [Attribute],
    pub variables: &'a Variables,
    /// Position of the statement, for missing attributes.
    pub place: Position,
}

impl Attributes<'_> {
    pub fn find(&self, name: &str) -> Option<&Attribute> {
        self.list.iter().find(|attribute| attribute.name == name)
    }

    /// The position of `name`, or of the statement.
    pub fn place_of(&self, name: &str) -> Position {
        let found = self.find(name);
        found.map_or(self.place, |found| found.value.as_ref().map_or(found.place, |(_, at)| *at))
    }

    fn known(&self, name: &str) -> Result<Option<Known>> {
        let Some(attribute) = self.find(name) else { return Ok(None) };
        match &attribute.value {
            Some((value, place)) => self.variables.resolve(value, *place).map(Some),
            None => Ok(Some(Known::Boolean(true))),
        }
    }

    fn wrong<T>(&self, name: &str, found: &Known, expected: &str) -> Result<T> {
        let bare = self.find(name).is_some_and(|attribute| attribute.value.is_none());
        let found = if bare { "nothing".into() } else { found.describe() };
        Err(Mistake::new(self.place_of(name), format!("{name} is {found}"), expected))
    }

    pub fn text(&self, name: &str) -> Result<Option<String>> {
        match self.known(name)? {
            None => Ok(None),
            Some(Known::Text(text)) => Ok(Some(text)),
            // A number is accepted as a name.
            Some(Known::Integer(number)) => Ok(Some(number.to_string())),
            Some(other) => self.wrong(name, &other, "a word"),
        }
    }

    pub fn required_text(&self, name: &str, of: &str) -> Result<String> {
        self.text(name)?.filter(|text| !text.is_empty()).ok_or_else(|| {
            Mistake::new(self.place, format!("{of} has no {name}"), format!("{name}=..."))
        })
    }

    pub fn flag(&self, name: &str) -> Result<bool> {
        match self.known(name)? {
            None => Ok(false),
            Some(Known::Boolean(flag)) => Ok(flag),
            Some(Known::Integer(number @ 0..=1)) => Ok(number == 1),
            Some(other) => self.wrong(name, &other, "true or false"),
        }
    }

    pub fn integer(&self, name: &str) -> Result<Option<i64>> {
        match self.known(name)? {
            None => Ok(None),
            Some(Known::Integer(number)) => Ok(Some(number)),
            Some(other) => self.wrong(name, &other, "a number"),
        }
    }

    /// A number that is not negative.
    pub fn count(&self, name: &str) -> Result<Option<u64>> {
        match self.integer(name)? {
            None => Ok(None),
            Some(number) => u64::try_from(number).map(Some).or_else(|_| {
                self.wrong(name, &Known::Integer(number), "a number that is not negative")
            }),
        }
    }

    /// Like [`Attributes::count`], but at least 1.
    pub fn positive(&self, name: &str) -> Result<Option<u64>> {
        match self.count(name)? {
            Some(0) => self.wrong(name, &Known::Integer(0), "at least 1"),
            other => Ok(other),
        }
    }

    /// A number that may be random.
    pub fn amount(&self, name: &str) -> Result<Option<Amount>> {
        match self.known(name)? {
            Some(Known::Random(variable)) => Ok(Some(Amount::Random(variable))),
            _ => Ok(self.count(name)?.map(Amount::Fixed)),
        }
    }

    /// A percentage: `prealloc`, `prealloc=80`, `prealloc=true`.
    pub fn percentage(&self, name: &str) -> Result<Option<u64>> {
        match self.known(name)? {
            None | Some(Known::Boolean(false)) => Ok(None),
            Some(Known::Boolean(true)) => Ok(Some(100)),
            Some(Known::Integer(number @ 0..=100)) => Ok(Some(number as u64)),
            Some(other) => self.wrong(name, &other, "0 to 100 per cent"),
        }
    }

    /// A random variable. Other values are refused.
    pub fn random(&self, name: &str) -> Result<Option<Arc<RandomVariable>>> {
        match self.known(name)? {
            None => Ok(None),
            Some(Known::Random(variable)) => Ok(Some(variable)),
            Some(other) => self.wrong(name, &other, "a random variable"),
        }
    }
}
