//! The flowops of the language, and their requirements.

use std::collections::BTreeMap;

use super::attributes::AttributeReader;
use super::variables::VariableScope;
use super::{FlowopKind, FlowopOpenFlags, FlowopPlan, PlanNumber, StatisticsRow};
use crate::lang::SourcePosition;
use crate::lang::ast::{FlowopUse, StatementAttribute};
use crate::lang::diagnostic::{LanguageError, LanguageResult};
use crate::random::RandomAmount;

/// Number of descriptors of a thread, as in Filebench.
pub const MAX_FD: usize = 128;

/// Maximum size of an I/O, and of a thread's memory.
pub(super) const MAX_IO: u64 = 16 << 30;

/// Maximum nesting depth of composite flowops.
const MAX_DEPTH: usize = 16;

/// Every flowop with its names; the first is the one in statistics.
const KINDS: &[(&[&str], FlowopKind)] = &[
    (&["createfile"], FlowopKind::CreateFile),
    (&["openfile"], FlowopKind::OpenFile),
    (&["closefile"], FlowopKind::CloseFile),
    (&["read"], FlowopKind::Read),
    (&["write"], FlowopKind::Write),
    (&["readwholefile"], FlowopKind::ReadWholeFile),
    (&["writewholefile"], FlowopKind::WriteWholeFile),
    (&["appendfile"], FlowopKind::AppendFile),
    (&["appendfilerand"], FlowopKind::AppendFileRand),
    (&["deletefile"], FlowopKind::DeleteFile),
    (&["statfile"], FlowopKind::StatFile),
    (&["fsync"], FlowopKind::Fsync),
    (&["fsyncset"], FlowopKind::FsyncSet),
    (&["makedir", "mkdir"], FlowopKind::MakeDir),
    (&["removedir", "rmdir"], FlowopKind::RemoveDir),
    (&["listdir"], FlowopKind::ListDir),
    (&["eventlimit"], FlowopKind::EventLimit),
    (&["bwlimit"], FlowopKind::BandwidthLimit),
    (&["iopslimit"], FlowopKind::IoOpsLimit),
    (&["opslimit"], FlowopKind::OpsLimit),
    (&["hog"], FlowopKind::Hog),
    (&["delay"], FlowopKind::Delay),
    (&["block"], FlowopKind::Block),
    (&["wakeup"], FlowopKind::Wakeup),
    (&["semblock"], FlowopKind::SemBlock),
    (&["sempost"], FlowopKind::SemPost),
    (&["finishoncount"], FlowopKind::FinishOnCount),
    (&["finishonbytes"], FlowopKind::FinishOnBytes),
];

/// Flowops of Filebench that are refused, with the reason.
const REFUSED: &[(&str, &str)] = &[
    ("aiowrite", "write, because POSIX aio would measure the threads of the C library"),
    ("aiowait", "write without aiowait, because POSIX aio is not supported"),
    ("print", "echo before run: a thread cannot print while it is measured"),
    ("testrandvar", "no test of random variables: they are tested with this program"),
];

/// A composite flowop, as defined.
#[derive(Clone)]
pub(super) struct CompositeFlowop {
    pub attributes: Vec<StatementAttribute>,
    pub flowops: Vec<FlowopUse>,
}

/// State shared by the flowops of all threads.
#[derive(Default)]
pub(super) struct FlowopTable {
    pub composites: BTreeMap<String, CompositeFlowop>,
    /// Names of file sets, by their index in the plan.
    pub filesets: Vec<String>,
    pub rows: Vec<StatisticsRow>,
    pub random: Vec<RandomAmount>,
    /// Targets by name, which can be resolved only when all flowops are known.
    pub wanted: Vec<(usize, String, SourcePosition)>,
}

impl FlowopTable {
    /// The steps of a thread.
    pub fn thread(
        &mut self,
        uses: &[FlowopUse],
        variables: &VariableScope,
    ) -> LanguageResult<Vec<FlowopPlan>> {
        let steps = self.build_steps(uses, variables, 0)?;
        let mut opened = Vec::new();
        collect_opened(&steps, &mut opened);
        check_descriptors(&steps, &opened, uses)?;
        Ok(steps)
    }

    fn build_steps(
        &mut self,
        uses: &[FlowopUse],
        variables: &VariableScope,
        depth: usize,
    ) -> LanguageResult<Vec<FlowopPlan>> {
        uses.iter().map(|one| self.step(one, variables, depth)).collect()
    }

    fn step(
        &mut self,
        one: &FlowopUse,
        variables: &VariableScope,
        depth: usize,
    ) -> LanguageResult<FlowopPlan> {
        let known = KINDS.iter().find(|(names, _)| names.contains(&one.kind.as_str()));
        let attributes = AttributeReader { list: &one.attributes, variables, place: one.place };
        let (kind, word) = match known {
            Some((names, kind)) => (kind.clone(), names[0]),
            None if self.composites.contains_key(&one.kind) => {
                return self.composite(one, &attributes, depth);
            }
            None => return Err(self.unknown_flowop_error(one)),
        };
        if let Some(local) = one.attributes.iter().find(|a| a.name.starts_with('$')) {
            let found = format!("{} for `{}`", local.name, one.kind);
            let expected = "an attribute: only composite flowops have variables of their own";
            return Err(LanguageError::new(local.place, found, expected));
        }
        let mut plan = self.plain(kind, &attributes)?;
        plan.name = attributes.text("name")?.unwrap_or_else(|| word.to_owned());
        plan.statistics = self.row(&plan, word);
        check(&plan, &attributes, word)?;
        if let Some(target) = attributes.text("target")? {
            self.wanted.push((plan.statistics, target, attributes.position_of("target")));
        }
        Ok(plan)
    }

    fn unknown_flowop_error(&self, one: &FlowopUse) -> LanguageError {
        let found = format!("found the flowop `{}`", one.kind);
        if let Some((_, instead)) = REFUSED.iter().find(|(name, _)| *name == one.kind) {
            return LanguageError::new(one.place, found, *instead);
        }
        let names = KINDS.iter().flat_map(|(names, _)| names.iter().copied());
        let names = names.chain(self.composites.keys().map(String::as_str));
        LanguageError::new(
            one.place,
            found,
            "a flowop of the language, or one that is defined above",
        )
        .suggest(&one.kind, names)
    }

    /// Expands a composite flowop: its flowops, with its variables set.
    fn composite(
        &mut self,
        one: &FlowopUse,
        attributes: &AttributeReader,
        depth: usize,
    ) -> LanguageResult<FlowopPlan> {
        if depth == MAX_DEPTH {
            let found = format!("`{}` is nested {MAX_DEPTH} times", one.kind);
            return Err(LanguageError::new(
                one.place,
                found,
                "composite flowops without recursion",
            ));
        }
        let composite = self.composites[&one.kind].clone();
        let mut inner = attributes.variables.clone();
        let mut locals = Vec::new();
        for attribute in composite.attributes.iter().filter(|a| a.name.starts_with('$')) {
            locals.push(attribute.name.as_str());
            if let Some((value, place)) = &attribute.value {
                inner.set(&attribute.name[1..], attributes.variables.resolve(value, *place)?);
            }
        }
        for attribute in &one.attributes {
            let Some(name) = attribute.name.strip_prefix('$') else {
                check_composite_attribute(attribute, &one.kind)?;
                continue;
            };
            if !locals.contains(&attribute.name.as_str()) {
                let found = format!("`{}` has no variable {}", one.kind, attribute.name);
                return Err(LanguageError::new(attribute.place, found, locals.join(", "))
                    .suggest(&attribute.name, locals.iter().copied()));
            }
            if let Some((value, place)) = &attribute.value {
                inner.set(name, attributes.variables.resolve(value, *place)?);
            }
        }
        let steps = self.build_steps(&composite.flowops, &inner, depth + 1)?;
        let defined =
            AttributeReader { list: &composite.attributes, variables: &inner, place: one.place };
        let mut plan = self.plain(FlowopKind::Composite(steps), attributes)?;
        if attributes.find("iters").is_none() {
            plan.iters = self.number(&defined, "iters", 1)?;
        }
        plan.name = attributes.text("name")?.unwrap_or_else(|| one.kind.clone());
        plan.statistics = usize::MAX;
        Ok(plan)
    }

    /// The attributes that do not depend on the kind.
    fn plain(
        &mut self,
        kind: FlowopKind,
        attributes: &AttributeReader,
    ) -> LanguageResult<FlowopPlan> {
        Ok(FlowopPlan {
            kind,
            name: String::new(),
            statistics: 0,
            line: attributes.place.line,
            fileset: self.fileset(attributes)?,
            fd: descriptor(attributes, "fd")?,
            srcfd: descriptor(attributes, "srcfd")?,
            opennext: attributes.flag("opennext")?,
            iosize: self.number(attributes, "iosize", 0)?,
            iters: self.number(attributes, "iters", 1)?,
            random: attributes.flag("random")?,
            indexed: match attributes.find("indexed") {
                Some(_) => Some(self.number(attributes, "indexed", 0)?),
                None => None,
            },
            workingset: attributes.count("workingset")?.unwrap_or(0),
            open: FlowopOpenFlags {
                direct: attributes.flag("directio")?,
                sync: attributes.flag("dsync")?,
                no_readahead: attributes.flag("noreadahead")?,
            },
            value: self.number(attributes, "value", 0)?,
            targets: Vec::new(),
            highwater: attributes.count("highwater")?.unwrap_or(1),
            blocking: attributes.flag("blocking")?,
        })
    }

    fn number(
        &mut self,
        attributes: &AttributeReader,
        name: &str,
        default: u64,
    ) -> LanguageResult<PlanNumber> {
        match attributes.find_amount(name)? {
            None => Ok(PlanNumber::Fixed(default)),
            Some(RandomAmount::Fixed(number)) => Ok(PlanNumber::Fixed(number)),
            Some(random) => {
                self.random.push(random);
                Ok(PlanNumber::Random(self.random.len() - 1))
            }
        }
    }

    fn fileset(&self, attributes: &AttributeReader) -> LanguageResult<Option<usize>> {
        let Some(name) = attributes.text("filename")? else { return Ok(None) };
        let found = self.filesets.iter().position(|known| *known == name);
        found.map(Some).ok_or_else(|| {
            let names = self.filesets.iter().map(String::as_str);
            let found = format!("there is no file set `{name}`");
            let expected = "one that is defined above";
            LanguageError::new(attributes.position_of("filename"), found, expected)
                .suggest(&name, names)
        })
    }

    fn row(&mut self, plan: &FlowopPlan, word: &'static str) -> usize {
        let same = |row: &StatisticsRow| row.name == plan.name && row.kind == word;
        self.rows.iter().position(same).unwrap_or_else(|| {
            self.rows.push(StatisticsRow {
                name: plan.name.clone(),
                kind: word,
                io: plan.kind.is_io(),
                reads: plan.kind.reads(),
                writes: plan.kind.writes(),
            });
            self.rows.len() - 1
        })
    }

    /// Resolves the targets of every flowop to rows.
    pub fn connect(&self, steps: &mut [FlowopPlan]) -> LanguageResult<()> {
        for step in steps {
            if let FlowopKind::Composite(inner) = &mut step.kind {
                self.connect(inner)?;
                continue;
            }
            for (_, name, place) in self.wanted.iter().filter(|(row, ..)| *row == step.statistics) {
                step.targets = self.targets(step, name, *place)?;
            }
        }
        Ok(())
    }

    fn targets(
        &self,
        step: &FlowopPlan,
        name: &str,
        place: SourcePosition,
    ) -> LanguageResult<Vec<usize>> {
        let kind = match step.kind {
            FlowopKind::Wakeup => Some("block"),
            FlowopKind::SemPost => Some("semblock"),
            _ => None,
        };
        let fits = |row: &StatisticsRow| row.name == name && kind.is_none_or(|k| row.kind == k);
        let places = self.rows.iter().enumerate().filter(|(_, row)| fits(row));
        let found: Vec<usize> = places.map(|(place, _)| place).collect();
        if found.is_empty() {
            let what = kind.unwrap_or("flowop");
            let names = self.rows.iter().filter(|row| kind.is_none_or(|kind| row.kind == kind));
            let mistake = LanguageError::new(
                place,
                format!("there is no {what} with the name `{name}`"),
                format!("the name of a {what}"),
            );
            return Err(mistake.suggest(name, names.map(|row| row.name.as_str())));
        }
        Ok(found)
    }
}

fn check_composite_attribute(attribute: &StatementAttribute, kind: &str) -> LanguageResult<()> {
    if ["name", "iters"].contains(&attribute.name.as_str()) {
        return Ok(());
    }
    let found = format!("{} for the composite flowop `{kind}`", attribute.name);
    Err(LanguageError::new(attribute.place, found, "name, iters or one of its $variables"))
}

fn descriptor(attributes: &AttributeReader, name: &str) -> LanguageResult<usize> {
    let number = attributes.count(name)?.unwrap_or(0);
    usize::try_from(number).ok().filter(|number| *number < MAX_FD).ok_or_else(|| {
        let place = attributes.position_of(name);
        LanguageError::new(place, format!("{name} is {number}"), format!("0 to {}", MAX_FD - 1))
    })
}

/// Checks the attributes that a kind requires.
fn check(plan: &FlowopPlan, attributes: &AttributeReader, word: &str) -> LanguageResult<()> {
    use FlowopKind::*;
    let missing = |name: &str, expected: &str| {
        Err(LanguageError::new(attributes.place, format!("`{word}` without {name}"), expected))
    };
    let by_descriptor = plan.fd > 0 && matches!(plan.kind, DeleteFile | StatFile);
    let picks = matches!(
        plan.kind,
        CreateFile | OpenFile | DeleteFile | StatFile | MakeDir | RemoveDir | ListDir | FsyncSet
    );
    if picks && plan.fileset.is_none() && !by_descriptor {
        return missing("filesetname", "filesetname=NAME");
    }
    let one_size = matches!(plan.kind, Read | Write | AppendFile | AppendFileRand);
    if one_size && plan.iosize == PlanNumber::Fixed(0) {
        return missing("iosize", "iosize=SIZE, at least 1");
    }
    if let PlanNumber::Fixed(iosize) = plan.iosize
        && iosize > MAX_IO
    {
        let found = format!("iosize is {iosize}");
        return Err(LanguageError::new(attributes.position_of("iosize"), found, "at most 16g"));
    }
    let needs_value = matches!(plan.kind, FinishOnCount | FinishOnBytes | Delay | Hog);
    if needs_value && attributes.find("value").is_none() {
        return missing("value", "value=NUMBER");
    }
    if matches!(plan.kind, Wakeup | SemPost) && attributes.find("target").is_none() {
        return missing("target", "target=NAME of the flowop that waits");
    }
    Ok(())
}

fn collect_opened(steps: &[FlowopPlan], opened: &mut Vec<usize>) {
    for step in steps {
        match &step.kind {
            FlowopKind::Composite(inner) => collect_opened(inner, opened),
            _ if step.fileset.is_some() => opened.push(step.fd),
            _ => {}
        }
    }
}

/// Refuses a flowop on a descriptor that no flowop opens.
fn check_descriptors(
    steps: &[FlowopPlan],
    opened: &[usize],
    uses: &[FlowopUse],
) -> LanguageResult<()> {
    for step in steps {
        if let FlowopKind::Composite(inner) = &step.kind {
            check_descriptors(inner, opened, uses)?;
        }
        let by_descriptor = step.kind.reads()
            || step.kind.writes()
            || matches!(step.kind, FlowopKind::CloseFile | FlowopKind::Fsync);
        if by_descriptor && step.fileset.is_none() && !opened.contains(&step.fd) {
            let place = uses.iter().map(|one| one.place).find(|place| place.line == step.line);
            let place = place.unwrap_or(SourcePosition { line: step.line, column: 1 });
            let found = format!("nothing opens descriptor {} of `{}`", step.fd, step.name);
            return Err(LanguageError::new(
                place,
                found,
                "filesetname=NAME, or an openfile with that fd",
            ));
        }
    }
    Ok(())
}
