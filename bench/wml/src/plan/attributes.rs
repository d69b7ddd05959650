//! Converts attributes to values of their types.

use std::sync::Arc;

use super::variables::{ResolvedValue, VariableScope};
use crate::lang::SourcePosition;
use crate::lang::ast::StatementAttribute;
use crate::lang::diagnostic::{LanguageError, LanguageResult};
use crate::random::{RandomAmount, RandomVariable};

/// The attributes of one statement, and the variables that they refer to.
pub(super) struct AttributeReader<'a> {
    pub list: &'a [StatementAttribute],
    pub variables: &'a VariableScope,
    /// Position of the statement, for missing attributes.
    pub place: SourcePosition,
}

impl AttributeReader<'_> {
    pub fn find(&self, name: &str) -> Option<&StatementAttribute> {
        self.list.iter().find(|attribute| attribute.name == name)
    }

    /// The position of `name`, or of the statement.
    pub fn position_of(&self, name: &str) -> SourcePosition {
        let found = self.find(name);
        found.map_or(self.place, |found| found.value.as_ref().map_or(found.place, |(_, at)| *at))
    }

    fn take_known(&self, name: &str) -> LanguageResult<Option<ResolvedValue>> {
        let Some(attribute) = self.find(name) else { return Ok(None) };
        match &attribute.value {
            Some((value, place)) => self.variables.resolve(value, *place).map(Some),
            None => Ok(Some(ResolvedValue::Boolean(true))),
        }
    }

    fn refuse_value<T>(
        &self,
        name: &str,
        found: &ResolvedValue,
        expected: &str,
    ) -> LanguageResult<T> {
        let bare = self.find(name).is_some_and(|attribute| attribute.value.is_none());
        let found = if bare { "nothing".into() } else { found.describe() };
        Err(LanguageError::new(self.position_of(name), format!("{name} is {found}"), expected))
    }

    pub fn text(&self, name: &str) -> LanguageResult<Option<String>> {
        match self.take_known(name)? {
            None => Ok(None),
            Some(ResolvedValue::Text(text)) => Ok(Some(text)),
            // A number is accepted as a name.
            Some(ResolvedValue::Integer(number)) => Ok(Some(number.to_string())),
            Some(other) => self.refuse_value(name, &other, "a word"),
        }
    }

    pub fn require_text(&self, name: &str, of: &str) -> LanguageResult<String> {
        self.text(name)?.filter(|text| !text.is_empty()).ok_or_else(|| {
            LanguageError::new(self.place, format!("{of} has no {name}"), format!("{name}=..."))
        })
    }

    pub fn flag(&self, name: &str) -> LanguageResult<bool> {
        match self.take_known(name)? {
            None => Ok(false),
            Some(ResolvedValue::Boolean(flag)) => Ok(flag),
            Some(ResolvedValue::Integer(number @ 0..=1)) => Ok(number == 1),
            Some(other) => self.refuse_value(name, &other, "true or false"),
        }
    }

    pub fn integer(&self, name: &str) -> LanguageResult<Option<i64>> {
        match self.take_known(name)? {
            None => Ok(None),
            Some(ResolvedValue::Integer(number)) => Ok(Some(number)),
            Some(other) => self.refuse_value(name, &other, "a number"),
        }
    }

    /// A number that is not negative.
    pub fn count(&self, name: &str) -> LanguageResult<Option<u64>> {
        match self.integer(name)? {
            None => Ok(None),
            Some(number) => u64::try_from(number).map(Some).or_else(|_| {
                self.refuse_value(
                    name,
                    &ResolvedValue::Integer(number),
                    "a number that is not negative",
                )
            }),
        }
    }

    /// Reads a number like [`AttributeReader::count`], but at least 1.
    pub fn positive(&self, name: &str) -> LanguageResult<Option<u64>> {
        match self.count(name)? {
            Some(0) => self.refuse_value(name, &ResolvedValue::Integer(0), "at least 1"),
            other => Ok(other),
        }
    }

    /// A number that may be random.
    pub fn find_amount(&self, name: &str) -> LanguageResult<Option<RandomAmount>> {
        match self.take_known(name)? {
            Some(ResolvedValue::Random(variable)) => Ok(Some(RandomAmount::Random(variable))),
            _ => Ok(self.count(name)?.map(RandomAmount::Fixed)),
        }
    }

    /// A percentage: `prealloc`, `prealloc=80`, `prealloc=true`.
    pub fn percentage(&self, name: &str) -> LanguageResult<Option<u64>> {
        match self.take_known(name)? {
            None | Some(ResolvedValue::Boolean(false)) => Ok(None),
            Some(ResolvedValue::Boolean(true)) => Ok(Some(100)),
            Some(ResolvedValue::Integer(number @ 0..=100)) => Ok(Some(number as u64)),
            Some(other) => self.refuse_value(name, &other, "0 to 100 per cent"),
        }
    }

    /// A random variable. Other values are refused.
    pub fn random(&self, name: &str) -> LanguageResult<Option<Arc<RandomVariable>>> {
        match self.take_known(name)? {
            None => Ok(None),
            Some(ResolvedValue::Random(variable)) => Ok(Some(variable)),
            Some(other) => self.refuse_value(name, &other, "a random variable"),
        }
    }
}
