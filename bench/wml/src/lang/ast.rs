//! The statements of a workload file, as they were written: variables are still names.

use super::Place;

/// A piece of a quoted string.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Part {
    /// Plain text.
    Text(String),
    /// The value of a variable.
    Variable(String, Place),
}

/// A value as it was written.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// A number; suffixes are already applied.
    Integer(i64),
    /// `true` or `false`.
    Boolean(bool),
    /// A word or a quoted string.
    Text(Vec<Part>),
    /// A variable.
    Variable(String),
    /// Two numbers and what is done with them, as in older versions of the language.
    Arithmetic(Box<[(Value, Place); 2]>, Operator),
    /// `randvar(...)`.
    RandomVariable(Vec<Attribute>),
    /// `cvar(...)`.
    CustomVariable(Vec<Attribute>),
    /// The table of a tabular random variable: rows of percent, lower and upper bound.
    Table(Vec<[(Value, Place); 3]>),
}

/// What is done with two numbers.
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
    /// Where the name stands.
    pub place: Place,
    /// The value, and where it stands.
    pub value: Option<(Value, Place)>,
}

/// `flowop KIND attributes`.
#[derive(Clone, Debug, PartialEq)]
pub struct FlowopUse {
    /// Which flowop.
    pub kind: String,
    /// Where its name stands.
    pub place: Place,
    /// Its attributes.
    pub attributes: Vec<Attribute>,
}

/// `thread attributes { flowops }`.
#[derive(Clone, Debug, PartialEq)]
pub struct ThreadDefinition {
    /// Where it begins.
    pub place: Place,
    /// Its attributes.
    pub attributes: Vec<Attribute>,
    /// What it does, over and over.
    pub flowops: Vec<FlowopUse>,
}

/// When a run ends.
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

/// What a statement does.
#[derive(Clone, Debug, PartialEq)]
pub enum Command {
    /// `set $name=value`.
    Set {
        /// The variable, without `$`.
        name: String,
        /// Its value.
        value: Value,
        /// Where the value stands.
        value_place: Place,
    },
    /// `set mode quit ...`.
    SetMode(QuitMode),
    /// `define file` (single) or `define fileset`.
    DefineFileset {
        /// Whether it is one file.
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
        /// What it does.
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
    Run(Option<(Value, Place)>),
    /// `psrun [-N [M]]`.
    PeriodicRun {
        /// The period; negative where statistics begin anew each time.
        period: i64,
        /// For how long.
        seconds: Option<i64>,
    },
    /// `enable lathist`.
    LatencyHistogram,
    /// `version`.
    Version,
    /// `quit` or `exit`.
    Quit,
    /// Something that has no effect here: `debug N`, `usage "..."`, `set mode nousestats`,
    /// `create processes`, `shutdown processes`.
    Nothing,
}

/// A command and where it begins.
#[derive(Clone, Debug, PartialEq)]
pub struct Statement {
    /// Where it begins.
    pub place: Place,
    /// What it does.
    pub command: Command,
}
