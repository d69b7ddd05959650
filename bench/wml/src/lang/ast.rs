//! The statements of a workload file as written, with unresolved variables.

use super::Position;

/// A piece of a quoted string.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Part {
    /// Plain text.
    Text(String),
    /// The value of a variable.
    Variable(String, Position),
}

/// A value as written.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// A number, with suffixes applied.
    Integer(i64),
    /// `true` or `false`.
    Boolean(bool),
    /// A word or a quoted string.
    Text(Vec<Part>),
    /// A variable.
    Variable(String),
    /// Two numbers and an operator, as in older versions of the language.
    Arithmetic(Box<[(Value, Position); 2]>, Operator),
    /// `randvar(...)`.
    RandomVariable(Vec<Attribute>),
    /// `cvar(...)`.
    CustomVariable(Vec<Attribute>),
    /// The table of a tabular random variable: rows of percent, lower and upper bound.
    Table(Vec<[(Value, Position); 3]>),
}

/// An arithmetic operator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operator {
    /// `+`
    Plus,
    /// `-`
    Minus,
    /// `*`
    Times,
    /// `/`, rounded towards zero.
    By,
}

/// `name` or `name=value`.
#[derive(Clone, Debug, PartialEq)]
pub struct Attribute {
    /// The name; that of a local variable begins with `$`.
    pub name: String,
    /// Position of the name.
    pub place: Position,
    /// The value and its position.
    pub value: Option<(Value, Position)>,
}

/// `flowop KIND attributes`.
#[derive(Clone, Debug, PartialEq)]
pub struct FlowopUse {
    /// The kind of flowop.
    pub kind: String,
    /// Position of its name.
    pub place: Position,
    /// Its attributes.
    pub attributes: Vec<Attribute>,
}

/// `thread attributes { flowops }`.
#[derive(Clone, Debug, PartialEq)]
pub struct ThreadDefinition {
    /// Position of its start.
    pub place: Position,
    /// Its attributes.
    pub attributes: Vec<Attribute>,
    /// The flowops that it repeats.
    pub flowops: Vec<FlowopUse>,
}

/// The condition that ends a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum QuitMode {
    /// After the given time. A flowop that finds no file is an error.
    #[default]
    Timeout,
    /// When every thread has ended.
    AllDone,
    /// When one thread has ended.
    FirstDone,
}

/// A command of the language.
#[derive(Clone, Debug, PartialEq)]
pub enum Command {
    /// `set $name=value`.
    Set {
        /// The variable, without `$`.
        name: String,
        /// Its value.
        value: Value,
        /// Position of the value.
        value_place: Position,
    },
    /// `set mode quit ...`.
    SetMode(QuitMode),
    /// `define file` (single) or `define fileset`.
    DefineFileset {
        /// `define file`: a single file.
        single: bool,
        /// Its attributes.
        attributes: Vec<Attribute>,
    },
    /// `define process attributes { threads }`.
    DefineProcess {
        /// Its attributes.
        attributes: Vec<Attribute>,
        /// Its threads.
        threads: Vec<ThreadDefinition>,
    },
    /// `define flowop attributes { flowops }`.
    DefineFlowop {
        /// Its attributes and local variables.
        attributes: Vec<Attribute>,
        /// Its flowops.
        flowops: Vec<FlowopUse>,
    },
    /// `create files`, `create filesets`.
    CreateFiles,
    /// `shutdown files`, `shutdown filesets`.
    RemoveFiles,
    /// `eventgen rate=N`.
    EventGenerator(Attribute),
    /// `echo "..."`.
    Echo(Vec<Part>),
    /// `system "..."`.
    System(Vec<Part>),
    /// `sleep N`.
    Sleep(Value),
    /// `run [N]`.
    Run(Option<(Value, Position)>),
    /// `psrun [-N [M]]`.
    PeriodicRun {
        /// The period; negative if statistics restart in each period.
        period: i64,
        /// The duration.
        seconds: Option<i64>,
    },
    /// `enable lathist`.
    LatencyHistogram,
    /// `version`.
    Version,
    /// `quit` or `exit`.
    Quit,
    /// A statement without effect here: `debug N`, `usage "..."`, `set mode nousestats`, `create
    /// processes`, `shutdown processes`.
    Nothing,
}

/// A command and its position.
#[derive(Clone, Debug, PartialEq)]
pub struct Statement {
    /// Position of its start.
    pub place: Position,
    /// The command.
    pub command: Command,
}
