//! The variables of a workload file, and the evaluation of values.

use std::collections::BTreeMap;
use std::sync::Arc;

use rand_distr::{Exp, Gamma, LogNormal, Normal, Triangular, Uniform, Weibull};

use crate::lang::Position;
use crate::lang::ast::{Attribute, Operator, Part, Value};
use crate::lang::diagnostic::Mistake;
use crate::random::{RandomVariable, Shape};

/// A value with all variables resolved.
#[derive(Clone, Debug)]
pub(super) enum Known {
    Integer(i64),
    Boolean(bool),
    Text(String),
    Random(Arc<RandomVariable>),
}

impl Known {
    pub fn describe(&self) -> String {
        match self {
            Known::Integer(number) => format!("the number {number}"),
            Known::Boolean(flag) => format!("{flag}"),
            Known::Text(text) => format!("the text `{text}`"),
            Known::Random(_) => "a random variable".into(),
        }
    }
}

/// Variables by name: those of the file, overridden by those of a composite flowop.
#[derive(Clone, Debug, Default)]
pub(super) struct Variables {
    values: BTreeMap<String, Known>,
}

type Result<T> = std::result::Result<T, Mistake>;

impl Variables {
    pub fn set(&mut self, name: &str, value: Known) {
        self.values.insert(name.to_owned(), value);
    }

    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.values.keys().map(String::as_str)
    }

    fn get(&self, name: &str, place: Position) -> Result<Known> {
        if let Some(inner) = name.strip_prefix('(').and_then(|name| name.strip_suffix(')')) {
            return std::env::var(inner).map(Known::Text).map_err(|_| {
                let found = format!("there is no {inner} in the environment");
                Mistake::new(place, found, "a variable of the environment")
            });
        }
        self.values.get(name).cloned().ok_or_else(|| {
            let found = format!("the variable ${name} is not set");
            let mut mistake =
                Mistake::new(place, found, format!("`set ${name}=...` above, or -D {name}=..."))
                    .like(name, self.names());
            mistake.suggestion = mistake.suggestion.map(|name| format!("${name}"));
            mistake
        })
    }

    /// Evaluates `value` with the current variables.
    pub fn resolve(&self, value: &Value, place: Position) -> Result<Known> {
        match value {
            Value::Integer(number) => Ok(Known::Integer(*number)),
            Value::Boolean(flag) => Ok(Known::Boolean(*flag)),
            Value::Variable(name) => self.get(name, place),
            Value::Text(parts) => self.text(parts).map(Known::Text),
            Value::Arithmetic(operands, operator) => {
                self.arithmetic(operands, *operator).map(Known::Integer)
            }
            Value::RandomVariable(attributes) => {
                self.randvar(attributes, place).map(|v| Known::Random(Arc::new(v)))
            }
            Value::CustomVariable(attributes) => {
                self.cvar(attributes, place).map(|v| Known::Random(Arc::new(v)))
            }
            Value::Table(_) => Err(Mistake::new(place, "found a table", "a number or a word")),
        }
    }

    fn arithmetic(&self, operands: &[(Value, Position); 2], operator: Operator) -> Result<i64> {
        let integer = |(value, place): &(Value, Position)| match self.resolve(value, *place)? {
            Known::Integer(number) => Ok(number),
            other => Err(Mistake::new(*place, format!("found {}", other.describe()), "a number")),
        };
        let [left, right] = [integer(&operands[0])?, integer(&operands[1])?];
        let result = match operator {
            Operator::Plus => left.checked_add(right),
            Operator::Minus => left.checked_sub(right),
            Operator::Times => left.checked_mul(right),
            Operator::By => left.checked_div(right),
        };
        result.ok_or_else(|| {
            let found = format!("the result of {left} and {right} is not valid");
            Mistake::new(operands[1].1, found, "a result below 2^63, and no division by 0")
        })
    }

    /// Evaluates a quoted string with variables.
    pub fn text(&self, parts: &[Part]) -> Result<String> {
        let mut text = String::new();
        for part in parts {
            match part {
                Part::Text(piece) => text.push_str(piece),
                Part::Variable(name, place) => match self.get(name, *place)? {
                    Known::Integer(number) => text.push_str(&number.to_string()),
                    Known::Boolean(flag) => text.push_str(&flag.to_string()),
                    Known::Text(piece) => text.push_str(&piece),
                    Known::Random(_) => text.push_str("(random)"),
                },
            }
        }
        Ok(text)
    }

    fn number(&self, attributes: &[Attribute], name: &str) -> Result<Option<f64>> {
        let Some(attribute) = attributes.iter().find(|attribute| attribute.name == name) else {
            return Ok(None);
        };
        let Some((value, place)) = &attribute.value else {
            let found = format!("{name} has no value");
            return Err(Mistake::new(attribute.place, found, format!("{name}=NUMBER")));
        };
        match self.resolve(value, *place)? {
            Known::Integer(number) => Ok(Some(number as f64)),
            other => {
                let found = format!("{name} is {}", other.describe());
                Err(Mistake::new(*place, found, "a number"))
            }
        }
    }

    fn word<'a>(
        &self,
        attributes: &'a [Attribute],
        name: &str,
    ) -> Result<Option<(String, Position)>>
    where
        Self: 'a,
    {
        let found = attributes.iter().find(|attribute| attribute.name == name);
        let Some((value, place)) = found.and_then(|attribute| attribute.value.as_ref()) else {
            return Ok(None);
        };
        match self.resolve(value, *place)? {
            Known::Text(word) => Ok(Some((word, *place))),
            other => {
                let found = format!("{name} is {}", other.describe());
                Err(Mistake::new(*place, found, "a word"))
            }
        }
    }

    /// `randvar(type=uniform|gamma|tabular, ...)`. Parameters of gamma are in thousandths.
    fn randvar(&self, attributes: &[Attribute], place: Position) -> Result<RandomVariable> {
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
                Shape::Gamma(min, above, spread)
            }
            "tabular" => self.table(attributes, place)?,
            other => {
                let found = format!("found the type `{other}`");
                return Err(Mistake::new(kind_place, found, "uniform, gamma or tabular")
                    .like(other, ["uniform", "gamma", "tabular"]));
            }
        };
        let mut variable = RandomVariable::new(shape);
        variable.min = Some(min);
        variable.round = self.number(attributes, "round")?.unwrap_or(0.0);
        Ok(variable)
    }

    fn table(&self, attributes: &[Attribute], place: Position) -> Result<Shape> {
        let table = attributes.iter().find(|attribute| attribute.name == "randtable");
        let Some((Value::Table(rows), place)) = table.and_then(|table| table.value.as_ref()) else {
            let found = "a tabular random variable without its table";
            return Err(Mistake::new(place, found, "randtable={{percent, lower, upper}, ...}"));
        };
        let (mut until, mut known) = (0.0, Vec::new());
        for row in rows {
            let mut numbers = [0.0; 3];
            for ((value, place), number) in row.iter().zip(&mut numbers) {
                *number = match self.resolve(value, *place)? {
                    Known::Integer(number) => number as f64,
                    other => return Err(Mistake::new(*place, other.describe(), "a number")),
                };
            }
            let [percent, low, high] = numbers;
            if percent < 0.0 || high < low {
                return Err(Mistake::new(
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
            return Err(Mistake::new(*place, found, "100"));
        }
        Ok(Shape::Table(known))
    }

    /// `cvar(type=cvar-NAME, parameters=key:value;...)`.
    fn cvar(&self, attributes: &[Attribute], place: Position) -> Result<RandomVariable> {
        let Some((kind, kind_place)) = self.word(attributes, "type")? else {
            return Err(Mistake::new(place, "a custom variable without a type", "type=cvar-..."));
        };
        let text = self.word(attributes, "parameters")?;
        let (text, text_place) = text.unwrap_or_else(|| (String::new(), place));
        let mut variable = RandomVariable::new(shape(&kind, kind_place, &text, text_place)?);
        variable.min = self.number(attributes, "min")?;
        variable.max = self.number(attributes, "max")?;
        variable.round = self.number(attributes, "round")?.unwrap_or(0.0);
        if variable.min.zip(variable.max).is_some_and(|(min, max)| min > max) {
            return Err(Mistake::new(place, "min is above max", "min <= max"));
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

fn shape(kind: &str, kind_place: Position, text: &str, place: Position) -> Result<Shape> {
    let Some((_, defaults)) = CUSTOM.iter().find(|(name, _)| *name == kind) else {
        let names: Vec<&str> = CUSTOM.iter().map(|(name, _)| *name).collect();
        let mistake = Mistake::new(kind_place, format!("found `{kind}`"), names.join(", "));
        return Err(mistake.like(kind, names));
    };
    let numbers = parameters(defaults, text, place)?;
    let (a, b) = (numbers[0], numbers.get(1).copied().unwrap_or(0.0));
    let wrong = |error: &dyn std::fmt::Display| impossible(place, error);
    Ok(match kind {
        "cvar-erlang" => Shape::Gamma(0.0, a / b, Gamma::new(a, 1.0 / b).map_err(|e| wrong(&e))?),
        "cvar-exponential" => Shape::Exponential(a, Exp::new(1.0 / a).map_err(|e| wrong(&e))?),
        "cvar-gamma" => Shape::Gamma(0.0, a, Gamma::new(b, a / b).map_err(|e| wrong(&e))?),
        // In randistrs, shape is the sigma of the logarithm, and scale is e to its mean.
        "cvar-lognormal" => {
            let spread = LogNormal::new(b.ln(), a).map_err(|e| wrong(&e))?;
            Shape::LogNormal(b * (a * a / 2.0).exp(), spread)
        }
        "cvar-normal" => Shape::Normal(a, Normal::new(a, b).map_err(|e| wrong(&e))?),
        "cvar-triangular" => {
            let mode = numbers[2];
            let spread = Triangular::new(a, b, mode).map_err(|e| wrong(&e))?;
            Shape::Triangular((a + b + mode) / 3.0, spread)
        }
        "cvar-uniform" => uniform(a, b, place)?,
        _ => Shape::Weibull(
            b * gamma_function(1.0 + 1.0 / a),
            Weibull::new(b, a).map_err(|e| wrong(&e))?,
        ),
    })
}

fn uniform(low: f64, high: f64, place: Position) -> Result<Shape> {
    let spread = Uniform::new_inclusive(low, high).map_err(|error| impossible(place, &error))?;
    Ok(Shape::Uniform((low + high) / 2.0, spread))
}

fn impossible(place: Position, error: &dyn std::fmt::Display) -> Mistake {
    Mistake::new(
        place,
        "found parameters that no distribution has",
        format!("possible ones: {error}"),
    )
}

/// The values of `key:value;key:value`, in the order of `defaults`.
fn parameters(defaults: &[(&str, f64)], text: &str, place: Position) -> Result<Vec<f64>> {
    let mut numbers: Vec<f64> = defaults.iter().map(|(_, value)| *value).collect();
    for pair in text.split(';').filter(|pair| !pair.is_empty()) {
        let (key, value) = pair.split_once(':').unwrap_or((pair, ""));
        let Some(index) = defaults.iter().position(|(name, _)| *name == key) else {
            let names: Vec<&str> = defaults.iter().map(|(name, _)| *name).collect();
            let mistake =
                Mistake::new(place, format!("found the parameter `{key}`"), names.join(", "));
            return Err(mistake.like(key, names));
        };
        numbers[index] = value.parse().ok().filter(|v: &f64| v.is_finite()).ok_or_else(|| {
            Mistake::new(place, format!("found `{pair}`"), format!("{key}:NUMBER"))
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
