//! Builds a plan from statements.

use std::collections::BTreeMap;

use super::attributes::AttributeReader;
use super::flowops::{CompositeFlowop, FlowopTable};
use super::variables::{ResolvedValue, VariableScope};
use super::{
    FilesetPlan, PlanScaling, ThreadPlan, WorkloadAction, WorkloadPlan, WorkloadRunPlan, scale,
};
use crate::lang::ast::{
    LanguageCommand, QuitMode, StatementAttribute, ThreadDefinition, ValueExpression,
    WorkloadStatement,
};
use crate::lang::diagnostic::{LanguageError, LanguageResult, closest};
use crate::lang::{self, LanguageDiagnostic, SourcePosition};
use crate::random::{RandomAmount, RandomGenerator, generator};

/// Maximum number of files or leaf directories of a set, whose tree then takes several gigabytes of
/// memory.
const MAX_ENTRIES: u64 = 100_000_000;

/// Options for loading a workload file.
#[derive(Clone, Debug)]
pub struct LoadOptions {
    /// Variables, each as `NAME=VALUE`, which override those that the file sets.
    pub variables: Vec<String>,
    /// Factor for data and counts: above 0, and 1 for the file as written.
    pub scale: f64,
    /// The seed of all random numbers.
    pub seed: u64,
    /// Allow `system`.
    pub allow_system: bool,
    /// Duration in seconds for a file without a `run` statement, like those written for the prompt
    /// of older versions of Filebench.
    pub run_seconds: Option<u64>,
}

impl Default for LoadOptions {
    fn default() -> Self {
        LoadOptions {
            variables: Vec::new(),
            scale: 1.0,
            seed: 1,
            allow_system: false,
            run_seconds: None,
        }
    }
}

/// Loads a workload file: `text`, which messages call `file`. Nothing is run or created.
///
/// # Errors
///
/// The first error in the file or in the options, with its position.
pub fn load(
    text: &str,
    file: &str,
    options: &LoadOptions,
) -> std::result::Result<WorkloadPlan, LanguageDiagnostic> {
    let statements = lang::parse(text, file)?;
    let overridden = variables_from_options(options, &statements)?;
    let mut builder = PlanBuilder {
        overridden,
        options,
        variables: VariableScope::default(),
        flowops: FlowopTable::default(),
        filesets: Vec::new(),
        processes: Vec::new(),
        run: RunState::default(),
        actions: Vec::new(),
        created: false,
        random: generator(options.seed, u64::MAX),
    };
    builder.statements(&statements).map_err(|mistake| mistake.with_file(file))?;
    let mut plan = WorkloadPlan {
        name: name_of(file),
        filesets: builder.filesets,
        variables: builder.flowops.random,
        rows: builder.flowops.rows,
        actions: builder.actions,
        scaling: PlanScaling::default(),
        seed: options.seed,
    };
    scale::apply(&mut plan, options.scale).map_err(|mistake| mistake.with_file(file))?;
    Ok(plan)
}

fn name_of(file: &str) -> String {
    let path = std::path::Path::new(file);
    path.file_stem().map_or_else(|| file.to_owned(), |stem| stem.to_string_lossy().into_owned())
}

/// The variables of the options. A variable that the file never sets is probably misspelt.
fn variables_from_options(
    options: &LoadOptions,
    statements: &[WorkloadStatement],
) -> std::result::Result<BTreeMap<String, ValueExpression>, LanguageDiagnostic> {
    let set: Vec<&str> = statements
        .iter()
        .filter_map(|statement| match &statement.command {
            LanguageCommand::Set { name, .. } => Some(name.as_str()),
            _ => None,
        })
        .collect();
    let mut overridden = BTreeMap::new();
    for text in &options.variables {
        let (name, value) = lang::parse_assignment(text)?;
        if !set.contains(&name.as_str()) {
            let expected = if set.is_empty() { "no variable".into() } else { set.join(", ") };
            return Err(LanguageDiagnostic {
                file: format!("-D {text}"),
                place: SourcePosition { line: 1, column: 1 },
                found: format!("the file does not set ${name}"),
                expected: format!("one that it sets: {expected}"),
                suggestion: closest(&name, set.iter().copied()),
            });
        }
        overridden.insert(name, value);
    }
    Ok(overridden)
}

#[derive(Default)]
struct RunState {
    quit: QuitMode,
    events: Option<u64>,
    histogram: bool,
}

struct ProcessDefinition {
    place: SourcePosition,
    attributes: Vec<StatementAttribute>,
    threads: Vec<ThreadDefinition>,
}

struct FilesetDefinition {
    name: String,
    single: bool,
    place: SourcePosition,
    attributes: Vec<StatementAttribute>,
}

struct PlanBuilder<'a> {
    overridden: BTreeMap<String, ValueExpression>,
    options: &'a LoadOptions,
    variables: VariableScope,
    flowops: FlowopTable,
    filesets: Vec<FilesetPlan>,
    processes: Vec<ProcessDefinition>,
    run: RunState,
    actions: Vec<WorkloadAction>,
    created: bool,
    random: RandomGenerator,
}

impl PlanBuilder<'_> {
    fn statements(&mut self, statements: &[WorkloadStatement]) -> LanguageResult<()> {
        let mut definitions: Vec<FilesetDefinition> = Vec::new();
        for WorkloadStatement { place, command } in statements {
            match command {
                LanguageCommand::DefineFileset { single, attributes } => {
                    definitions.push(self.fileset_name(
                        *single,
                        *place,
                        attributes,
                        &definitions,
                    )?);
                }
                LanguageCommand::CreateFiles => self.create(&mut definitions)?,
                LanguageCommand::Run(seconds) => {
                    self.create_once(&mut definitions)?;
                    let seconds = match seconds {
                        Some((value, place)) => self.seconds(value, *place)?,
                        None => 0,
                    };
                    self.add_run(seconds, 0, false, *place)?;
                }
                LanguageCommand::PeriodicRun { period, seconds } => {
                    self.create_once(&mut definitions)?;
                    let seconds = seconds.unwrap_or(0).unsigned_abs();
                    self.add_run(seconds, period.unsigned_abs(), *period < 0, *place)?;
                }
                LanguageCommand::Quit => break,
                other => self.statement(other, *place)?,
            }
        }
        let runs = |action: &WorkloadAction| matches!(action, WorkloadAction::Run(_));
        if let Some(seconds) = self.options.run_seconds.filter(|_| !self.actions.iter().any(runs)) {
            self.create_once(&mut definitions)?;
            let place = statements.last().map(|last| last.place).unwrap_or_default();
            self.add_run(seconds, 0, false, place)?;
        }
        // Errors in unused definitions are errors, too.
        self.filesets_of(&mut definitions)?;
        if self.processes.is_empty() || !self.actions.iter().any(runs) {
            self.threads()?;
        }
        Ok(())
    }

    fn statement(
        &mut self,
        command: &LanguageCommand,
        place: SourcePosition,
    ) -> LanguageResult<()> {
        match command {
            LanguageCommand::Set { name, value, value_place } => {
                let value = self.overridden.get(name).unwrap_or(value);
                let value = self.variables.resolve(value, *value_place)?;
                self.variables.set(name, value);
            }
            LanguageCommand::SetMode(quit) => self.run.quit = *quit,
            LanguageCommand::DefineProcess { attributes, threads } => {
                self.processes.push(ProcessDefinition {
                    place,
                    attributes: attributes.clone(),
                    threads: threads.clone(),
                })
            }
            LanguageCommand::DefineFlowop { attributes, flowops } => {
                let list = AttributeReader { list: attributes, variables: &self.variables, place };
                let name = list.require_text("name", "the flowop")?;
                let composite =
                    CompositeFlowop { attributes: attributes.clone(), flowops: flowops.clone() };
                self.flowops.composites.insert(name, composite);
            }
            LanguageCommand::EventGenerator(rate) => {
                let list = std::slice::from_ref(rate);
                let list = AttributeReader { list, variables: &self.variables, place };
                self.run.events = list.count("rate")?.filter(|rate| *rate > 0);
            }
            LanguageCommand::Echo(parts) => {
                self.actions.push(WorkloadAction::Echo(self.variables.text(parts)?))
            }
            LanguageCommand::System(parts) => {
                let line = self.variables.text(parts)?;
                if !self.options.allow_system {
                    let found = format!("the file runs the command `{line}`");
                    return Err(LanguageError::new(place, found, "--allow-system to permit that"));
                }
                self.actions.push(WorkloadAction::System(line));
            }
            LanguageCommand::Sleep(value) => {
                let seconds = self.seconds(value, place)?;
                self.actions.push(WorkloadAction::Sleep(seconds));
            }
            LanguageCommand::LatencyHistogram => self.run.histogram = true,
            LanguageCommand::Version => {
                let version = env!("CARGO_PKG_VERSION");
                self.actions.push(WorkloadAction::Echo(format!(
                    "defuse {version}, language of Filebench 1.5"
                )));
            }
            LanguageCommand::RemoveFiles => self.actions.push(WorkloadAction::RemoveFiles),
            _ => {}
        }
        Ok(())
    }

    fn seconds(&self, value: &ValueExpression, place: SourcePosition) -> LanguageResult<u64> {
        match self.variables.resolve(value, place)? {
            ResolvedValue::Integer(seconds) if (0..=1 << 31).contains(&seconds) => {
                Ok(seconds as u64)
            }
            other => {
                Err(LanguageError::new(place, format!("found {}", other.describe()), "seconds"))
            }
        }
    }

    fn fileset_name(
        &self,
        single: bool,
        place: SourcePosition,
        attributes: &[StatementAttribute],
        earlier: &[FilesetDefinition],
    ) -> LanguageResult<FilesetDefinition> {
        let list = AttributeReader { list: attributes, variables: &self.variables, place };
        let name = list.require_text("name", if single { "the file" } else { "the file set" })?;
        let taken = earlier.iter().any(|one| one.name == name)
            || self.filesets.iter().any(|one| one.name == name);
        if taken {
            let found = format!("`{name}` is defined twice");
            return Err(LanguageError::new(place, found, "another name"));
        }
        if name.contains('/') || name == "." || name == ".." {
            let found = format!("the name `{name}`");
            return Err(LanguageError::new(
                list.position_of("name"),
                found,
                "a name without slashes",
            ));
        }
        Ok(FilesetDefinition { name, single, place, attributes: attributes.to_vec() })
    }

    fn create(&mut self, definitions: &mut Vec<FilesetDefinition>) -> LanguageResult<()> {
        self.filesets_of(definitions)?;
        self.actions.push(WorkloadAction::CreateFiles);
        self.created = true;
        Ok(())
    }

    /// A run creates the files that do not exist yet.
    fn create_once(&mut self, definitions: &mut Vec<FilesetDefinition>) -> LanguageResult<()> {
        if !self.created || !definitions.is_empty() { self.create(definitions) } else { Ok(()) }
    }

    /// Evaluates the definitions of file sets with the current values of the variables.
    fn filesets_of(&mut self, definitions: &mut Vec<FilesetDefinition>) -> LanguageResult<()> {
        for definition in definitions.drain(..) {
            let plan = self.fileset(&definition)?;
            self.flowops.filesets.push(plan.name.clone());
            self.filesets.push(plan);
        }
        Ok(())
    }

    fn fileset(&mut self, definition: &FilesetDefinition) -> LanguageResult<FilesetPlan> {
        let FilesetDefinition { name, single, place, attributes } = definition;
        let list = AttributeReader { list: attributes, variables: &self.variables, place: *place };
        let path = list.require_text("path", &format!("`{name}`"))?;
        // The number of entries is drawn once, because the rest of the set depends on it.
        let random = &mut self.random;
        let entries = list.find_amount("entries")?.map_or(u64::from(*single), |n| n.get(random));
        let leafdirs = list.find_amount("leafdirs")?.map_or(0, |number| number.get(random));
        if entries == 0 && leafdirs == 0 {
            let found = format!("`{name}` has no entries");
            return Err(LanguageError::new(
                list.position_of("entries"),
                found,
                "entries=NUMBER, at least 1",
            ));
        }
        for (what, number) in [("entries", entries), ("leafdirs", leafdirs)] {
            if number > MAX_ENTRIES {
                let found = format!("`{name}` has {number} {what}");
                let expected = format!("at most {MAX_ENTRIES}, each of which takes memory");
                return Err(LanguageError::new(list.position_of(what), found, expected));
            }
        }
        let dirwidth = list.find_amount("dirwidth")?.unwrap_or(RandomAmount::Fixed(0));
        if list.find("dirwidth").is_some() && dirwidth.mean() < 1.0 {
            let found = format!("`{name}` has directories without entries");
            return Err(LanguageError::new(list.position_of("dirwidth"), found, "at least 1"));
        }
        let size = list.find_amount("size")?.unwrap_or(RandomAmount::Fixed(0));
        if size.mean() > (1u64 << 62) as f64 / entries.max(1) as f64 {
            let found = format!("`{name}` would have more than 2^62 bytes");
            return Err(LanguageError::new(list.position_of("size"), found, "a possible size"));
        }
        let thousandths = |name: &str, default: u64| -> LanguageResult<f64> {
            Ok(list.count(name)?.unwrap_or(default) as f64 / 1000.0)
        };
        Ok(FilesetPlan {
            name: name.clone(),
            path: path.into(),
            entries,
            size,
            size_gamma: thousandths("filesizegamma", 0)?,
            dirwidth,
            dirgamma: if *single { 0.0 } else { thousandths("dirgamma", 1500)? },
            dirdepth: list.random("dirdepthrv")?.map(RandomAmount::Random),
            leafdirs,
            prealloc: list.percentage("prealloc")?,
            paralloc: list.flag("paralloc")?,
            reuse: list.flag("reuse")?,
            trusttree: list.flag("trusttree")?,
            readonly: list.flag("readonly")?,
            writeonly: list.flag("writeonly")?,
            cached: list.flag("cached")?,
        })
    }

    fn add_run(
        &mut self,
        seconds: u64,
        period: u64,
        resets: bool,
        place: SourcePosition,
    ) -> LanguageResult<()> {
        if self.processes.is_empty() {
            let expected = "`define process` above";
            return Err(LanguageError::new(place, "there is no process to run", expected));
        }
        let threads = self.threads()?;
        self.actions.push(WorkloadAction::Run(WorkloadRunPlan {
            seconds: (seconds > 0).then_some(seconds),
            period,
            resets,
            quit: self.run.quit,
            events: self.run.events,
            histogram: self.run.histogram,
            threads,
        }));
        Ok(())
    }

    /// All threads of all processes, with the current values of the variables.
    fn threads(&mut self) -> LanguageResult<Vec<ThreadPlan>> {
        let mut threads = Vec::new();
        self.flowops.wanted.clear();
        for process in &self.processes {
            let list = AttributeReader {
                list: &process.attributes,
                variables: &self.variables,
                place: process.place,
            };
            let name = list.text("name")?.unwrap_or_else(|| "process".to_owned());
            let instances = list.positive("instances")?.unwrap_or(1);
            let nice = niceness(&list)?;
            for thread in &process.threads {
                let mut plan = thread_plan(&mut self.flowops, &self.variables, thread)?;
                plan.process.clone_from(&name);
                plan.instances = instances.saturating_mul(plan.instances);
                plan.nice = nice;
                threads.push(plan);
            }
        }
        let total = threads.iter().map(|t| t.instances).fold(0, u64::saturating_add);
        if let Some(process) = self.processes.first().filter(|_| total > 65_536) {
            let found = format!("there would be {total} threads");
            return Err(LanguageError::new(process.place, found, "at most 65536"));
        }
        for thread in &mut threads {
            self.flowops.connect(&mut thread.flowops)?;
        }
        Ok(threads)
    }
}

fn niceness(list: &AttributeReader) -> LanguageResult<i32> {
    let nice = list.integer("nice")?.unwrap_or(0);
    i32::try_from(nice).ok().filter(|nice| (-20..20).contains(nice)).ok_or_else(|| {
        LanguageError::new(list.position_of("nice"), format!("nice is {nice}"), "-20 to 19")
    })
}

fn thread_plan(
    flowops: &mut FlowopTable,
    variables: &VariableScope,
    thread: &ThreadDefinition,
) -> LanguageResult<ThreadPlan> {
    let list = AttributeReader { list: &thread.attributes, variables, place: thread.place };
    if list.find("ioprio").is_some() {
        let expected = "nice of the process, or ionice(1) around all";
        return Err(LanguageError::new(
            list.position_of("ioprio"),
            "ioprio is not supported",
            expected,
        ));
    }
    list.flag("useism")?;
    let memsize = list.count("memsize")?.unwrap_or(0);
    if memsize > super::flowops::MAX_IO {
        let found = format!("memsize is {memsize}");
        return Err(LanguageError::new(
            list.position_of("memsize"),
            found,
            "at most 16g for each thread",
        ));
    }
    Ok(ThreadPlan {
        process: String::new(),
        name: list.text("name")?.unwrap_or_else(|| "thread".to_owned()),
        instances: list.positive("instances")?.unwrap_or(1),
        memsize,
        nice: 0,
        flowops: flowops.thread(&thread.flowops, variables)?,
    })
}
