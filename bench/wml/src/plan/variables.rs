//! The variables of a workload file, and the evaluation of values.

use std::collections::BTreeMap;
use std::sync::Arc;

use rand_distr::{Exp, Gamma, LogNormal, Normal, Triangular, Uniform, Weibull};

use crate::lang::SourcePosition;
use crate::lang::ast::{ArithmeticOperator, StatementAttribute, StringPart, ValueExpression};
use crate::lang::diagnostic::{LanguageError, LanguageResult};
use crate::random::{RandomDistribution, RandomVariable};

/// A value with all variables resolved.
#[derive(Clone, Debug)]
pub(super) enum ResolvedValue {
    Integer(i64),
    Boolean(bool),
    Text(String),
    Random(Arc<RandomVariable>),
}

impl ResolvedValue {
    pub fn describe(&self) -> String {
        match self {
            ResolvedValue::Integer(number) => format!("the number {number}"),
            ResolvedValue::Boolean(flag) => format!("{flag}"),
            ResolvedValue::Text(text) => format!("the text `{text}`"),
            ResolvedValue::Random(_) => "a random variable".into(),
        }
    }
}

/// Variables by name: the variables of the file, overridden by the variables of a composite flowop.
#[derive(Clone, Debug, Default)]
pub(super) struct VariableScope {
    values: BTreeMap<String, ResolvedValue>,
}

impl VariableScope {
    pub fn set(&mut self, name: &str, value: ResolvedValue) {
        self.values.insert(name.to_owned(), value);
    }

    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.values.keys().map(String::as_str)
    }

    fn get(&self, name: &str, place: SourcePosition) -> LanguageResult<ResolvedValue> {
        if let Some(inner) = name.strip_prefix('(').and_then(|name| name.strip_suffix(')')) {
            return std::env::var(inner).map(ResolvedValue::Text).map_err(|_| {
                let found = format!("there is no {inner} in the environment");
                LanguageError::new(place, found, "a variable of the environment")
            });
        }
        self.values.get(name).cloned().ok_or_else(|| {
            let found = format!("the variable ${name} is not set");
            let mut mistake = LanguageError::new(
                place,
                found,
                format!("`set ${name}=...` above, or -D {name}=..."),
            )
            .suggest(name, self.names());
            mistake.suggestion = mistake.suggestion.map(|name| format!("${name}"));
            mistake
        })
    }

    /// Evaluates `value` with the current variables.
    pub fn resolve(
        &self,
        value: &ValueExpression,
        place: SourcePosition,
    ) -> LanguageResult<ResolvedValue> {
        match value {
            ValueExpression::Integer(number) => Ok(ResolvedValue::Integer(*number)),
            ValueExpression::Boolean(flag) => Ok(ResolvedValue::Boolean(*flag)),
            ValueExpression::Variable(name) => self.get(name, place),
            ValueExpression::Text(parts) => self.text(parts).map(ResolvedValue::Text),
            ValueExpression::Arithmetic(operands, operator) => {
                self.arithmetic(operands, *operator).map(ResolvedValue::Integer)
            }
            ValueExpression::RandomVariable(attributes) => {
                self.randvar(attributes, place).map(|v| ResolvedValue::Random(Arc::new(v)))
            }
            ValueExpression::CustomVariable(attributes) => {
                self.cvar(attributes, place).map(|v| ResolvedValue::Random(Arc::new(v)))
            }
            ValueExpression::Table(_) => {
                Err(LanguageError::new(place, "found a table", "a number or a word"))
            }
        }
    }

    fn arithmetic(
        &self,
        operands: &[(ValueExpression, SourcePosition); 2],
        operator: ArithmeticOperator,
    ) -> LanguageResult<i64> {
        let integer = |(value, place): &(ValueExpression, SourcePosition)| match self
            .resolve(value, *place)?
        {
            ResolvedValue::Integer(number) => Ok(number),
            other => {
                Err(LanguageError::new(*place, format!("found {}", other.describe()), "a number"))
            }
        };
        let [left, right] = [integer(&operands[0])?, integer(&operands[1])?];
        let result = match operator {
            ArithmeticOperator::Plus => left.checked_add(right),
            ArithmeticOperator::Minus => left.checked_sub(right),
            ArithmeticOperator::Times => left.checked_mul(right),
            ArithmeticOperator::By => left.checked_div(right),
        };
        result.ok_or_else(|| {
            let found = format!("the result of {left} and {right} is not valid");
            LanguageError::new(operands[1].1, found, "a result below 2^63, and no division by 0")
        })
    }

    /// Evaluates a quoted string with variables.
    pub fn text(&self, parts: &[StringPart]) -> LanguageResult<String> {
        let mut text = String::new();
        for part in parts {
            match part {
                StringPart::Text(piece) => text.push_str(piece),
                StringPart::Variable(name, place) => match self.get(name, *place)? {
                    ResolvedValue::Integer(number) => text.push_str(&number.to_string()),
                    ResolvedValue::Boolean(flag) => text.push_str(&flag.to_string()),
                    ResolvedValue::Text(piece) => text.push_str(&piece),
                    ResolvedValue::Random(_) => text.push_str("(random)"),
                },
            }
        }
        Ok(text)
    }

    fn number(&self, attributes: &[StatementAttribute], name: &str) -> LanguageResult<Option<f64>> {
        let Some(attribute) = attributes.iter().find(|attribute| attribute.name == name) else {
            return Ok(None);
        };
        let Some((value, place)) = &attribute.value else {
            let found = format!("{name} has no value");
            return Err(LanguageError::new(attribute.place, found, format!("{name}=NUMBER")));
        };
        match self.resolve(value, *place)? {
            ResolvedValue::Integer(number) => Ok(Some(number as f64)),
            other => {
                let found = format!("{name} is {}", other.describe());
                Err(LanguageError::new(*place, found, "a number"))
            }
        }
    }

    fn word<'a>(
        &self,
        attributes: &'a [StatementAttribute],
        name: &str,
    ) -> LanguageResult<Option<(String, SourcePosition)>>
    where
        Self: 'a,
    {
        let found = attributes.iter().find(|attribute| attribute.name == name);
        let Some((value, place)) = found.and_then(|attribute| attribute.value.as_ref()) else {
            return Ok(None);
        };
        match self.resolve(value, *place)? {
            ResolvedValue::Text(word) => Ok(Some((word, *place))),
            other => {
                let found = format!("{name} is {}", other.describe());
                Err(LanguageError::new(*place, found, "a word"))
            }
        }
    }

    /// `randvar(type=uniform|gamma|tabular, ...)`. Parameters of gamma are in thousandths.
    fn randvar(
        &self,
        attributes: &[StatementAttribute],
        place: SourcePosition,
    ) -> LanguageResult<RandomVariable> {
        let (kind, kind_place) =
            self.word(attributes, "type")?.unwrap_or_else(|| ("gamma".to_owned(), place));
        let min = self.number(attributes, "min")?.unwrap_or(0.0);
        let mean = self.number(attributes, "mean")?;
        let shape = match kind.as_str() {
            "uniform" => {
                let mean = mean.unwrap_or(min);
                uniform(min, (2.0 * mean - min).max(min), place)?
            }
            "gamma" => {
                let gamma = self.number(attributes, "gamma")?.unwrap_or(1500.0) / 1000.0;
                let above = mean.unwrap_or(min + 1.0) - min;
                let spread = Gamma::new(gamma, above / gamma).map_err(|e| impossible(place, &e))?;
                RandomDistribution::Gamma(min, above, spread)
            }
            "tabular" => self.table(attributes, place)?,
            other => {
                let found = format!("found the type `{other}`");
                return Err(LanguageError::new(kind_place, found, "uniform, gamma or tabular")
                    .suggest(other, ["uniform", "gamma", "tabular"]));
            }
        };
        let mut variable = RandomVariable::new(shape);
        variable.min = Some(min);
        variable.round = self.number(attributes, "round")?.unwrap_or(0.0);
        Ok(variable)
    }

    fn table(
        &self,
        attributes: &[StatementAttribute],
        place: SourcePosition,
    ) -> LanguageResult<RandomDistribution> {
        let table = attributes.iter().find(|attribute| attribute.name == "randtable");
        let Some((ValueExpression::Table(rows), place)) =
            table.and_then(|table| table.value.as_ref())
        else {
            let found = "a tabular random variable without its table";
            return Err(LanguageError::new(
                place,
                found,
                "randtable={{percent, lower, upper}, ...}",
            ));
        };
        let (mut until, mut known) = (0.0, Vec::new());
        for row in rows {
            let mut numbers = [0.0; 3];
            for ((value, place), number) in row.iter().zip(&mut numbers) {
                *number = match self.resolve(value, *place)? {
                    ResolvedValue::Integer(number) => number as f64,
                    other => return Err(LanguageError::new(*place, other.describe(), "a number")),
                };
            }
            let [percent, low, high] = numbers;
            if percent < 0.0 || high < low {
                return Err(LanguageError::new(
                    row[0].1,
                    "an impossible row",
                    "lower <= upper, percent >= 0",
                ));
            }
            until += percent / 100.0;
            known.push((until, low, high));
        }
        if (until - 1.0).abs() > 1e-6 {
            let found = format!("the percentages add up to {}", until * 100.0);
            return Err(LanguageError::new(*place, found, "100"));
        }
        Ok(RandomDistribution::Table(known))
    }

    /// `cvar(type=cvar-NAME, parameters=key:value;...)`.
    fn cvar(
        &self,
        attributes: &[StatementAttribute],
        place: SourcePosition,
    ) -> LanguageResult<RandomVariable> {
        let Some((kind, kind_place)) = self.word(attributes, "type")? else {
            return Err(LanguageError::new(
                place,
                "a custom variable without a type",
                "type=cvar-...",
            ));
        };
        let text = self.word(attributes, "parameters")?;
        let (text, text_place) = text.unwrap_or_else(|| (String::new(), place));
        let mut variable = RandomVariable::new(shape(&kind, kind_place, &text, text_place)?);
        variable.min = self.number(attributes, "min")?;
        variable.max = self.number(attributes, "max")?;
        variable.round = self.number(attributes, "round")?.unwrap_or(0.0);
        if variable.min.zip(variable.max).is_some_and(|(min, max)| min > max) {
            return Err(LanguageError::new(place, "min is above max", "min <= max"));
        }
        Ok(variable)
    }
}

/// The custom variables, with their parameters and defaults.
const CUSTOM: &[(&str, &[(&str, f64)])] = &[
    ("cvar-erlang", &[("shape", 1.0), ("rate", 1.0)]),
    ("cvar-exponential", &[("mean", 1.0)]),
    ("cvar-gamma", &[("mean", 4096.0), ("gamma", 1.5)]),
    ("cvar-lognormal", &[("shape", 1.0), ("scale", 1.0)]),
    ("cvar-normal", &[("mean", 0.0), ("sigma", 1.0)]),
    ("cvar-triangular", &[("lower", 0.0), ("upper", 1.0), ("mode", 1.0)]),
    ("cvar-uniform", &[("lower", 0.0), ("upper", 1.0)]),
    ("cvar-weibull", &[("shape", 1.0), ("scale", 1.0)]),
];

fn shape(
    kind: &str,
    kind_place: SourcePosition,
    text: &str,
    place: SourcePosition,
) -> LanguageResult<RandomDistribution> {
    let Some((_, defaults)) = CUSTOM.iter().find(|(name, _)| *name == kind) else {
        let names: Vec<&str> = CUSTOM.iter().map(|(name, _)| *name).collect();
        let mistake = LanguageError::new(kind_place, format!("found `{kind}`"), names.join(", "));
        return Err(mistake.suggest(kind, names));
    };
    let numbers = parameters(defaults, text, place)?;
    let (a, b) = (numbers[0], numbers.get(1).copied().unwrap_or(0.0));
    let wrong = |error: &dyn std::fmt::Display| impossible(place, error);
    Ok(match kind {
        "cvar-erlang" => {
            RandomDistribution::Gamma(0.0, a / b, Gamma::new(a, 1.0 / b).map_err(|e| wrong(&e))?)
        }
        "cvar-exponential" => {
            RandomDistribution::Exponential(a, Exp::new(1.0 / a).map_err(|e| wrong(&e))?)
        }
        "cvar-gamma" => {
            RandomDistribution::Gamma(0.0, a, Gamma::new(b, a / b).map_err(|e| wrong(&e))?)
        }
        // In randistrs, shape is the sigma of the logarithm, and scale is e to its mean.
        "cvar-lognormal" => {
            let spread = LogNormal::new(b.ln(), a).map_err(|e| wrong(&e))?;
            RandomDistribution::LogNormal(b * (a * a / 2.0).exp(), spread)
        }
        "cvar-normal" => RandomDistribution::Normal(a, Normal::new(a, b).map_err(|e| wrong(&e))?),
        "cvar-triangular" => {
            let mode = numbers[2];
            let spread = Triangular::new(a, b, mode).map_err(|e| wrong(&e))?;
            RandomDistribution::Triangular((a + b + mode) / 3.0, spread)
        }
        "cvar-uniform" => uniform(a, b, place)?,
        _ => RandomDistribution::Weibull(
            b * gamma_function(1.0 + 1.0 / a),
            Weibull::new(b, a).map_err(|e| wrong(&e))?,
        ),
    })
}

fn uniform(low: f64, high: f64, place: SourcePosition) -> LanguageResult<RandomDistribution> {
    let spread = Uniform::new_inclusive(low, high).map_err(|error| impossible(place, &error))?;
    Ok(RandomDistribution::Uniform((low + high) / 2.0, spread))
}

fn impossible(place: SourcePosition, error: &dyn std::fmt::Display) -> LanguageError {
    LanguageError::new(
        place,
        "found parameters that no distribution has",
        format!("possible ones: {error}"),
    )
}

/// The values of `key:value;key:value`, in the order of `defaults`.
fn parameters(
    defaults: &[(&str, f64)],
    text: &str,
    place: SourcePosition,
) -> LanguageResult<Vec<f64>> {
    let mut numbers: Vec<f64> = defaults.iter().map(|(_, value)| *value).collect();
    for pair in text.split(';').filter(|pair| !pair.is_empty()) {
        let (key, value) = pair.split_once(':').unwrap_or((pair, ""));
        let Some(index) = defaults.iter().position(|(name, _)| *name == key) else {
            let names: Vec<&str> = defaults.iter().map(|(name, _)| *name).collect();
            let mistake =
                LanguageError::new(place, format!("found the parameter `{key}`"), names.join(", "));
            return Err(mistake.suggest(key, names));
        };
        numbers[index] = value.parse().ok().filter(|v: &f64| v.is_finite()).ok_or_else(|| {
            LanguageError::new(place, format!("found `{pair}`"), format!("{key}:NUMBER"))
        })?;
    }
    Ok(numbers)
}

/// The gamma function above 1, by Stirling's series; only for the mean of a Weibull distribution.
fn gamma_function(x: f64) -> f64 {
    // The series is accurate from 8 on; the recurrence is used below.
    if x < 8.0 {
        return gamma_function(x + 1.0) / x;
    }
    let log = (x - 0.5) * x.ln() - x + 0.5 * (2.0 * std::f64::consts::PI).ln() + 1.0 / (12.0 * x)
        - 1.0 / (360.0 * x.powi(3));
    log.exp()
}
