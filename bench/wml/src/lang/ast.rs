//! The statements of a workload file as written, with unresolved variables.

use super::SourcePosition;

/// A piece of a quoted string.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StringPart {
    /// Plain text.
    Text(String),
    /// The value of a variable.
    Variable(String, SourcePosition),
}

/// A value as written.
#[derive(Clone, Debug, PartialEq)]
pub enum ValueExpression {
    /// A number, with suffixes applied.
    Integer(i64),
    /// `true` or `false`.
    Boolean(bool),
    /// A word or a quoted string.
    Text(Vec<StringPart>),
    /// A variable.
    Variable(String),
    /// Two numbers and an operator, as in older versions of the language.
    Arithmetic(Box<[(ValueExpression, SourcePosition); 2]>, ArithmeticOperator),
    /// `randvar(...)`.
    RandomVariable(Vec<StatementAttribute>),
    /// `cvar(...)`.
    CustomVariable(Vec<StatementAttribute>),
    /// The table of a tabular random variable: rows of percent, lower and upper bound.
    Table(Vec<[(ValueExpression, SourcePosition); 3]>),
}

/// An arithmetic operator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ArithmeticOperator {
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
pub struct StatementAttribute {
    /// The name; the name of a local variable begins with `$`.
    pub name: String,
    /// Position of the name.
    pub place: SourcePosition,
    /// The value and its position.
    pub value: Option<(ValueExpression, SourcePosition)>,
}

/// `flowop KIND attributes`.
#[derive(Clone, Debug, PartialEq)]
pub struct FlowopUse {
    /// The kind of flowop.
    pub kind: String,
    /// Position of its name.
    pub place: SourcePosition,
    /// Its attributes.
    pub attributes: Vec<StatementAttribute>,
}

/// `thread attributes { flowops }`.
#[derive(Clone, Debug, PartialEq)]
pub struct ThreadDefinition {
    /// Position of its start.
    pub place: SourcePosition,
    /// Its attributes.
    pub attributes: Vec<StatementAttribute>,
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
pub enum LanguageCommand {
    /// `set $name=value`.
    Set {
        /// The variable, without `$`.
        name: String,
        /// Its value.
        value: ValueExpression,
        /// Position of the value.
        value_place: SourcePosition,
    },
    /// `set mode quit ...`.
    SetMode(QuitMode),
    /// `define file` (single) or `define fileset`.
    DefineFileset {
        /// `define file`: a single file.
        single: bool,
        /// Its attributes.
        attributes: Vec<StatementAttribute>,
    },
    /// `define process attributes { threads }`.
    DefineProcess {
        /// Its attributes.
        attributes: Vec<StatementAttribute>,
        /// Its threads.
        threads: Vec<ThreadDefinition>,
    },
    /// `define flowop attributes { flowops }`.
    DefineFlowop {
        /// Its attributes and local variables.
        attributes: Vec<StatementAttribute>,
        /// Its flowops.
        flowops: Vec<FlowopUse>,
    },
    /// `create files`, `create filesets`.
    CreateFiles,
    /// `shutdown files`, `shutdown filesets`.
    RemoveFiles,
    /// `eventgen rate=N`.
    EventGenerator(StatementAttribute),
    /// `echo "..."`.
    Echo(Vec<StringPart>),
    /// `system "..."`.
    System(Vec<StringPart>),
    /// `sleep N`.
    Sleep(ValueExpression),
    /// `run [N]`.
    Run(Option<(ValueExpression, SourcePosition)>),
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
pub struct WorkloadStatement {
    /// Position of its start.
    pub place: SourcePosition,
    /// The command.
    pub command: LanguageCommand,
}
