//! The parser: from tokens to statements.

use super::ast::{
    ArithmeticOperator, FlowopUse, LanguageCommand, QuitMode, StatementAttribute, ThreadDefinition,
    ValueExpression, WorkloadStatement,
};
use super::diagnostic::{LanguageError, LanguageResult};
use super::lex::{LanguageToken, tokens};
use super::schema::{self, AttributeSchema};
use super::{LanguageDiagnostic, SourcePosition};

const COMMANDS: &[&str] = &[
    "create",
    "debug",
    "define",
    "domultisync",
    "echo",
    "enable",
    "eventgen",
    "exit",
    "psrun",
    "quit",
    "run",
    "set",
    "shutdown",
    "sleep",
    "system",
    "usage",
    "version",
];

/// Statements that are refused, mostly of older versions of Filebench, and their replacements.
const REFUSED: &[(&str, &str)] = &[
    ("foreach", "`define process`, `run` and so on for each value, or a loop around -D VAR=VALUE"),
    ("fscheck", "no check of the file system: use its own program when the run is over"),
    ("fsflush", "`create files`, which drops created files from the page cache"),
    ("help", "nothing interactive: docs/workloads.md lists the language"),
    ("list", "nothing interactive: docs/workloads.md lists the flowops"),
    ("log", "`echo \"...\"`"),
    ("stats", "`run SECONDS` or `psrun`, which measure and print by themselves"),
    ("warmup", "a first `run SECONDS` whose result is ignored"),
];

/// The statements of `text`. Messages name the file `file`.
pub fn parse(
    text: &str,
    file: &str,
) -> std::result::Result<Vec<WorkloadStatement>, LanguageDiagnostic> {
    statements(text).map_err(|mistake| mistake.with_file(file))
}

/// Parses `name=value`, as after `set $`.
pub fn parse_assignment(
    text: &str,
) -> std::result::Result<(String, ValueExpression), LanguageDiagnostic> {
    let whole = format!("set ${text}");
    let one = |mut found: Vec<WorkloadStatement>| match (found.pop(), found.is_empty()) {
        (
            Some(WorkloadStatement { command: LanguageCommand::Set { name, value, .. }, .. }),
            true,
        ) => Ok((name, value)),
        _ => Err(LanguageError::new(
            SourcePosition::default(),
            "found more than a value",
            "NAME=VALUE",
        )),
    };
    statements(&whole).and_then(one).map_err(|mistake| mistake.with_file(&format!("-D {text}")))
}

fn statements(text: &str) -> LanguageResult<Vec<WorkloadStatement>> {
    let mut parser = LanguageParser { tokens: tokens(text)?, at: 0 };
    let mut found = Vec::new();
    while *parser.peek() != LanguageToken::End {
        let place = parser.position();
        let command = parser.command()?;
        found.push(WorkloadStatement { place, command });
    }
    Ok(found)
}

struct LanguageParser {
    tokens: Vec<(LanguageToken, SourcePosition)>,
    at: usize,
}

impl LanguageParser {
    fn peek(&self) -> &LanguageToken {
        &self.tokens[self.at].0
    }

    fn position(&self) -> SourcePosition {
        self.tokens[self.at].1
    }

    fn advance(&mut self) -> LanguageToken {
        let token = self.tokens[self.at].0.clone();
        // Stays at the final `End` token.
        self.at = (self.at + 1).min(self.tokens.len() - 1);
        token
    }

    fn expect_other<T>(&self, expected: impl Into<String>) -> LanguageResult<T> {
        Err(LanguageError::new(self.position(), self.peek().describe(), expected))
    }

    fn is_symbol(&self, symbol: char) -> bool {
        *self.peek() == LanguageToken::Symbol(symbol)
    }

    fn symbol(&mut self, symbol: char, where_: &str) -> LanguageResult<()> {
        if !self.is_symbol(symbol) {
            return self.expect_other(format!("`{symbol}` {where_}"));
        }
        self.advance();
        Ok(())
    }

    fn word(&mut self, expected: &str) -> LanguageResult<String> {
        match self.peek() {
            LanguageToken::Word(_) => match self.advance() {
                LanguageToken::Word(word) => Ok(word),
                _ => unreachable!("it was a word"),
            },
            _ => self.expect_other(expected),
        }
    }

    /// Parses one of several words.
    fn parse_one_of(&mut self, known: &[&'static str]) -> LanguageResult<&'static str> {
        let place = self.position();
        let expected = format!("one of {}", known.join(", "));
        let word = self.word(&expected)?;
        known.iter().find(|&&name| name == word).copied().ok_or_else(|| {
            LanguageError::new(place, format!("found `{word}`"), expected)
                .suggest(&word, known.iter().copied())
        })
    }

    fn command(&mut self) -> LanguageResult<LanguageCommand> {
        let place = self.position();
        let name = match self.peek() {
            LanguageToken::Word(_) => self.word("")?,
            _ => return self.expect_other("a command, such as set, define, create or run"),
        };
        match name.as_str() {
            "set" => self.set(),
            "define" => self.define(),
            "create" => match self.entity()? {
                "files" => Ok(LanguageCommand::CreateFiles),
                _ => Ok(LanguageCommand::Nothing),
            },
            "shutdown" => match self.entity()? {
                "files" => Ok(LanguageCommand::RemoveFiles),
                _ => Ok(LanguageCommand::Nothing),
            },
            "echo" => self.parse_quoted().map(LanguageCommand::Echo),
            "system" => self.parse_quoted().map(LanguageCommand::System),
            "usage" => self.parse_quoted().map(|_| LanguageCommand::Nothing),
            "debug" => self.integer("the level").map(|_| LanguageCommand::Nothing),
            "eventgen" => self.event_generator(),
            "enable" => self.enable(place),
            "run" => self.run(),
            "psrun" => self.periodic_run(),
            "sleep" => self.sleep(),
            "version" => Ok(LanguageCommand::Version),
            "quit" | "exit" => Ok(LanguageCommand::Quit),
            "domultisync" => Err(several_clients_error(place, &name)),
            _ => {
                let found = format!("found `{name}`");
                if let Some((_, instead)) = REFUSED.iter().find(|(known, _)| *known == name) {
                    return Err(LanguageError::new(
                        place,
                        format!("{found}, which is refused"),
                        *instead,
                    ));
                }
                Err(LanguageError::new(place, found, "a command")
                    .suggest(&name, COMMANDS.iter().copied()))
            }
        }
    }

    fn entity(&mut self) -> LanguageResult<&'static str> {
        let known =
            ["file", "files", "fileset", "filesets", "process", "processes", "thread", "threads"];
        let word = self.parse_one_of(&known)?;
        Ok(if word.starts_with("file") { "files" } else { "processes" })
    }

    fn enable(&mut self, place: SourcePosition) -> LanguageResult<LanguageCommand> {
        match self.parse_one_of(&["lathist", "multi"])? {
            "lathist" => Ok(LanguageCommand::LatencyHistogram),
            _ => Err(several_clients_error(place, "enable multi")),
        }
    }

    fn parse_quoted(&mut self) -> LanguageResult<Vec<super::ast::StringPart>> {
        match self.peek() {
            LanguageToken::Quoted(_) => match self.advance() {
                LanguageToken::Quoted(parts) => Ok(parts),
                _ => unreachable!("it was a string"),
            },
            _ => self.expect_other("a \"string\""),
        }
    }

    fn integer(&mut self, what: &str) -> LanguageResult<i64> {
        match *self.peek() {
            LanguageToken::Integer(number) => {
                self.advance();
                Ok(number)
            }
            _ => self.expect_other(format!("a number: {what}")),
        }
    }

    fn event_generator(&mut self) -> LanguageResult<LanguageCommand> {
        let mut attributes = self.attributes(&schema::EVENT_GENERATOR)?;
        Ok(LanguageCommand::EventGenerator(attributes.remove(0)))
    }

    fn run(&mut self) -> LanguageResult<LanguageCommand> {
        let place = self.position();
        match self.peek() {
            LanguageToken::Integer(_) | LanguageToken::Variable(_) => {
                Ok(LanguageCommand::Run(Some((self.value()?, place))))
            }
            _ => Ok(LanguageCommand::Run(None)),
        }
    }

    fn periodic_run(&mut self) -> LanguageResult<LanguageCommand> {
        let mut number = || match *self.peek() {
            LanguageToken::Integer(number) => {
                self.advance();
                Some(number)
            }
            _ => None,
        };
        let period = number();
        let seconds = if period.is_some() { number() } else { None };
        if seconds.is_some_and(|seconds| seconds < 0) {
            self.at -= 1;
            return self.expect_other("the number of seconds to run, which is not negative");
        }
        Ok(LanguageCommand::PeriodicRun { period: period.unwrap_or(0), seconds })
    }

    fn sleep(&mut self) -> LanguageResult<LanguageCommand> {
        match self.peek() {
            LanguageToken::Integer(_) | LanguageToken::Variable(_) => {
                self.value().map(LanguageCommand::Sleep)
            }
            _ => self.expect_other("the number of seconds to sleep"),
        }
    }

    fn set(&mut self) -> LanguageResult<LanguageCommand> {
        match self.peek().clone() {
            LanguageToken::Word(word) if word == "mode" => {
                self.advance();
                self.mode()
            }
            LanguageToken::Variable(name) if !name.starts_with('(') => {
                self.advance();
                self.symbol('=', "and a value")?;
                let value_place = self.position();
                let value = self.parse_assigned()?;
                Ok(LanguageCommand::Set { name, value, value_place })
            }
            _ => self.expect_other("a $variable, or mode"),
        }
    }

    fn mode(&mut self) -> LanguageResult<LanguageCommand> {
        if self.parse_one_of(&["quit", "nousestats"])? == "nousestats" {
            return Ok(LanguageCommand::Nothing);
        }
        let mode = match self.parse_one_of(&["alldone", "firstdone", "timeout"])? {
            "alldone" => QuitMode::AllDone,
            "firstdone" => QuitMode::FirstDone,
            _ => QuitMode::Timeout,
        };
        Ok(LanguageCommand::SetMode(mode))
    }

    /// The value in `set $name=value`.
    fn parse_assigned(&mut self) -> LanguageResult<ValueExpression> {
        let LanguageToken::Word(word) = self.peek().clone() else { return self.arithmetic() };
        let schema = match word.as_str() {
            "randvar" => &schema::RANDVAR,
            "cvar" => &schema::CVAR,
            _ => return self.value(),
        };
        self.advance();
        self.symbol('(', "and its attributes")?;
        let attributes = self.attributes(schema)?;
        self.symbol(')', "or `,` and another attribute")?;
        Ok(if word == "cvar" {
            ValueExpression::CustomVariable(attributes)
        } else {
            ValueExpression::RandomVariable(attributes)
        })
    }

    /// A value, or an operation on two numbers.
    fn arithmetic(&mut self) -> LanguageResult<ValueExpression> {
        let (left_place, left) = (self.position(), self.value()?);
        // A minus directly before a number is its sign, and a slash may begin a path.
        let operator = match self.peek() {
            LanguageToken::Symbol('+') => ArithmeticOperator::Plus,
            LanguageToken::Symbol('*') => ArithmeticOperator::Times,
            LanguageToken::Word(word) if word == "-" => ArithmeticOperator::Minus,
            LanguageToken::Word(word) if word == "/" => ArithmeticOperator::By,
            _ => return Ok(left),
        };
        self.advance();
        let place = self.position();
        match self.peek() {
            LanguageToken::Integer(_) | LanguageToken::Variable(_) => {}
            _ => return self.expect_other("a number or a $variable"),
        }
        let right = self.value()?;
        Ok(ValueExpression::Arithmetic(Box::new([(left, left_place), (right, place)]), operator))
    }

    /// A value of an attribute.
    fn value(&mut self) -> LanguageResult<ValueExpression> {
        let value = match self.peek().clone() {
            LanguageToken::Integer(number) => ValueExpression::Integer(number),
            LanguageToken::Variable(name) => ValueExpression::Variable(name),
            LanguageToken::Quoted(parts) => ValueExpression::Text(parts),
            LanguageToken::Word(word) if word == "true" => ValueExpression::Boolean(true),
            LanguageToken::Word(word) if word == "false" => ValueExpression::Boolean(false),
            LanguageToken::Word(word) => {
                ValueExpression::Text(vec![super::ast::StringPart::Text(word)])
            }
            LanguageToken::Symbol('{') => return self.table(),
            _ => return self.expect_other("a value: a number, true, false, a word or a $variable"),
        };
        self.advance();
        Ok(value)
    }

    /// `{{percent, lower, upper}, ...}`.
    fn table(&mut self) -> LanguageResult<ValueExpression> {
        let mut rows = Vec::new();
        self.symbol('{', "before the table")?;
        loop {
            self.symbol('{', "before a row of the table")?;
            let percent = self.cell()?;
            self.symbol(',', "after the percentage")?;
            let lower = self.cell()?;
            self.symbol(',', "after the lower bound")?;
            let upper = self.cell()?;
            self.symbol('}', "after the upper bound")?;
            rows.push([percent, lower, upper]);
            if !self.is_symbol(',') {
                break;
            }
            self.advance();
        }
        self.symbol('}', "after the table, or `,` and another row")?;
        Ok(ValueExpression::Table(rows))
    }

    fn cell(&mut self) -> LanguageResult<(ValueExpression, SourcePosition)> {
        let place = self.position();
        match self.peek() {
            LanguageToken::Integer(_) | LanguageToken::Variable(_) => Ok((self.value()?, place)),
            _ => self.expect_other("a number or a $variable"),
        }
    }

    /// `name[=value], ...`, where each name must be in `schema`.
    fn attributes(&mut self, schema: &AttributeSchema) -> LanguageResult<Vec<StatementAttribute>> {
        let mut found: Vec<StatementAttribute> = Vec::new();
        loop {
            let attribute = self.attribute(schema)?;
            if found.iter().any(|earlier| earlier.name == attribute.name) {
                let found = format!("{} is given twice", attribute.name);
                return Err(LanguageError::new(attribute.place, found, "each attribute once"));
            }
            found.push(attribute);
            if !self.is_symbol(',') {
                return Ok(found);
            }
            self.advance();
        }
    }

    fn attribute(&mut self, schema: &AttributeSchema) -> LanguageResult<StatementAttribute> {
        let place = self.position();
        let name = match self.peek().clone() {
            LanguageToken::Word(word) => match schema.canonical(&word) {
                Some(name) => name.to_owned(),
                None => return Err(schema.unknown_name_error(&word, place)),
            },
            LanguageToken::Variable(name) if schema.has_locals => format!("${name}"),
            _ => return self.expect_other(format!("an attribute of {}", schema.of)),
        };
        self.advance();
        if !self.is_symbol('=') {
            return Ok(StatementAttribute { name, place, value: None });
        }
        self.advance();
        let value_place = self.position();
        let value = if name == "parameters" { self.parameters()? } else { self.value()? };
        Ok(StatementAttribute { name, place, value: Some((value, value_place)) })
    }

    /// `key:value;key:value`, which the lexer may split into several tokens.
    fn parameters(&mut self) -> LanguageResult<ValueExpression> {
        let mut text = String::new();
        loop {
            match self.peek() {
                LanguageToken::Word(word) => text.push_str(word),
                LanguageToken::Quoted(_) if text.is_empty() => return self.value(),
                LanguageToken::Variable(_) if text.is_empty() => return self.value(),
                _ if text.is_empty() => {
                    return self.expect_other("parameters such as mean:16;gamma:1.5");
                }
                _ => return Ok(ValueExpression::Text(vec![super::ast::StringPart::Text(text)])),
            }
            self.advance();
        }
    }

    fn define(&mut self) -> LanguageResult<LanguageCommand> {
        let known =
            ["file", "fileset", "files", "filesets", "process", "processes", "flowop", "randvar"];
        match self.parse_one_of(&known)? {
            "file" | "files" => self.define_files(true),
            "fileset" | "filesets" => self.define_files(false),
            "flowop" => {
                let attributes = self.attributes(&schema::COMPOSITE)?;
                Ok(LanguageCommand::DefineFlowop { attributes, flowops: self.flowops()? })
            }
            "randvar" => self.define_randvar(),
            _ => {
                let attributes = self.attributes(&schema::PROCESS)?;
                self.symbol('{', "and the threads of the process")?;
                let mut threads = Vec::new();
                while !self.is_symbol('}') {
                    threads.push(self.thread()?);
                }
                self.symbol('}', "after the threads")?;
                Ok(LanguageCommand::DefineProcess { attributes, threads })
            }
        }
    }

    fn define_files(&mut self, single: bool) -> LanguageResult<LanguageCommand> {
        let schema = if single { &schema::FILE } else { &schema::FILESET };
        Ok(LanguageCommand::DefineFileset { single, attributes: self.attributes(schema)? })
    }

    /// `define randvar name=$v, ...`, the older form of `set $v=randvar(...)`.
    fn define_randvar(&mut self) -> LanguageResult<LanguageCommand> {
        let value_place = self.position();
        let mut attributes = self.attributes(&schema::RANDVAR)?;
        let place = attributes.iter().position(|attribute| attribute.name == "name");
        let named = place.map(|place| attributes.remove(place));
        match named.and_then(|attribute| attribute.value) {
            Some((ValueExpression::Variable(name), _)) => Ok(LanguageCommand::Set {
                name,
                value: ValueExpression::RandomVariable(attributes),
                value_place,
            }),
            _ => Err(LanguageError::new(value_place, "the random variable has no name", "name=$v")),
        }
    }

    fn thread(&mut self) -> LanguageResult<ThreadDefinition> {
        let place = self.position();
        self.parse_one_of(&["thread"])?;
        let attributes = self.attributes(&schema::THREAD)?;
        Ok(ThreadDefinition { place, attributes, flowops: self.flowops()? })
    }

    /// `{ flowop ... }`.
    fn flowops(&mut self) -> LanguageResult<Vec<FlowopUse>> {
        self.symbol('{', "and flowops")?;
        let mut found = Vec::new();
        while !self.is_symbol('}') {
            self.parse_one_of(&["flowop"])?;
            let place = self.position();
            let kind = self.word("the kind of a flowop, such as openfile or read")?;
            let more = matches!(self.peek(), LanguageToken::Word(word) if word != "flowop")
                || matches!(self.peek(), LanguageToken::Variable(_));
            let attributes = if more { self.attributes(&schema::FLOWOP)? } else { Vec::new() };
            found.push(FlowopUse { kind, place, attributes });
        }
        if found.is_empty() {
            return self.expect_other("at least one flowop");
        }
        self.symbol('}', "after the flowops")?;
        Ok(found)
    }
}

fn several_clients_error(place: SourcePosition, what: &str) -> LanguageError {
    let expected = "a workload of one machine: several clients are not supported";
    LanguageError::new(place, format!("found `{what}`"), expected)
}
