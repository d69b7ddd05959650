//! A machine of QEMU: two NVMe controllers behind an IOMMU, a port on which the guest reports, and
//! the control of QEMU itself.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};

/// Lines of the guest that a failure shows.
const SHOWN: usize = 30;
/// The longest time for a device to leave its slot.
const LEAVES: Duration = Duration::from_secs(60);

/// The files that a machine needs.
pub struct MachineFiles {
    /// The image of the kernel.
    pub kernel: PathBuf,
    /// The initial file system.
    pub initial: PathBuf,
    /// The disk of each controller.
    pub disks: [PathBuf; 2],
    /// The directory of sockets and logs.
    pub dir: PathBuf,
}

/// A running machine. It ends when this is dropped, as by a power cut.
pub struct GuestMachine {
    child: Child,
    lines: Receiver<String>,
    /// All lines so far, for messages.
    seen: Vec<String>,
    control: PathBuf,
    console: PathBuf,
    job: String,
    until: Instant,
}

/// A line of the guest.
#[derive(Debug, PartialEq, Eq)]
pub enum GuestLine {
    /// A check passed.
    Passed(String),
    /// A value: its name and text.
    Value(String, String),
    /// The guest wants something of this side.
    Wants(String),
    /// Data is durable: the writer and the number of its file.
    Durable(u32, u32),
    /// The job is done.
    End,
}

impl GuestMachine {
    /// Boots the guest for the job that is the first word of `line`, which may take `limit`. All of
    /// `line` is on the command line of the kernel.
    pub fn boot(files: &MachineFiles, line: &str, limit: Duration) -> Result<GuestMachine> {
        let job = line.split(' ').next().unwrap_or(line);
        let control = files.dir.join("control");
        let console = files.dir.join(format!("console-{job}"));
        let _ = fs::remove_file(&control);
        let mut command = Command::new("qemu-system-x86_64");
        command.args(arguments(files, line, &control, &console));
        command.stdin(Stdio::null()).stdout(Stdio::piped());
        let mut child = command.spawn().context("cannot start qemu-system-x86_64")?;
        let output = child.stdout.take().context("no output of QEMU")?;
        let (sender, lines) = channel();
        let read = move || {
            for line in BufReader::new(output).split(b'\n').map_while(Result::ok) {
                let line = String::from_utf8_lossy(&line).trim_end().to_owned();
                if sender.send(line).is_err() {
                    return;
                }
            }
        };
        std::thread::Builder::new().name("guest".to_owned()).spawn(read)?;
        let (job, until) = (job.to_owned(), Instant::now() + limit);
        Ok(GuestMachine { child, lines, seen: Vec::new(), control, console, job, until })
    }

    /// Its job.
    pub fn job(&self) -> &str {
        &self.job
    }

    /// The next message of the guest.
    ///
    /// # Errors
    ///
    /// Fails where a check of the guest failed, and where it sends no message in time.
    pub fn next(&mut self) -> Result<GuestLine> {
        loop {
            let left = self.until.saturating_duration_since(Instant::now());
            let line = match self.lines.recv_timeout(left) {
                Ok(line) => line,
                Err(RecvTimeoutError::Timeout) => {
                    bail!("{}", self.describe_end("it takes too long"))
                }
                Err(RecvTimeoutError::Disconnected) => bail!("{}", self.describe_end("QEMU ended")),
            };
            self.seen.push(line.clone());
            match parse(&line) {
                Some(Ok(said)) => return Ok(said),
                Some(Err(check)) => bail!("{}", self.describe_end(&format!("{check} failed"))),
                None => {}
            }
        }
    }

    /// Requests that the guest release its first controller, which then leaves its slot.
    pub fn take_out(&self) -> Result<()> {
        self.control("device_del", json!({ "id": "nvme0" }))
    }

    /// Puts the first controller into its slot again. The former one leaves it a moment after the
    /// guest has let it go.
    pub fn put_in(&self) -> Result<()> {
        let begun = Instant::now();
        loop {
            match self.control("device_add", controller(0)) {
                Err(error) if is_in_its_slot(&error) && begun.elapsed() < LEAVES => {
                    std::thread::sleep(Duration::from_millis(100));
                }
                done => return done,
            }
        }
    }

    /// Runs a command of QEMU's control (QMP).
    fn control(&self, command: &str, arguments: Value) -> Result<()> {
        let stream = UnixStream::connect(&self.control)?;
        stream.set_read_timeout(Some(Duration::from_secs(60)))?;
        let mut lines = BufReader::new(stream.try_clone()?).lines();
        let mut stream = &stream;
        let mut answer = move || -> Result<Value> {
            loop {
                let line = lines.next().context("QEMU ended its control")??;
                let value: Value = serde_json::from_str(&line)?;
                if value.get("event").is_none() {
                    return Ok(value);
                }
            }
        };
        answer()?;
        for line in [
            json!({ "execute": "qmp_capabilities" }),
            json!({ "execute": command, "arguments": arguments }),
        ] {
            writeln!(stream, "{line}")?;
            let said = answer()?;
            ensure!(said.get("return").is_some(), "{command}: {said}");
        }
        Ok(())
    }

    /// Ends the machine at once.
    pub fn cut_power(mut self) -> Result<()> {
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }

    /// A message with the last lines.
    fn describe_end(&self, what: &str) -> String {
        let console = fs::read(&self.console).unwrap_or_default();
        let console = String::from_utf8_lossy(&console).into_owned();
        let console: Vec<&str> = console.lines().map(str::trim_end).collect();
        let last = |lines: &[&str]| lines[lines.len().saturating_sub(SHOWN)..].join("\n");
        let seen: Vec<&str> = self.seen.iter().map(String::as_str).collect();
        let (job, seen, console) = (&self.job, last(&seen), last(&console));
        format!("guest, job {job}: {what}\n{seen}\nits console:\n{console}")
    }
}

/// True if QEMU refuses a device because the former one is there, or has its disk yet.
fn is_in_its_slot(error: &anyhow::Error) -> bool {
    let said = error.to_string();
    ["Duplicate device ID", "Permission conflict on node"].iter().any(|part| said.contains(part))
}

impl Drop for GuestMachine {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn arguments(files: &MachineFiles, job: &str, control: &Path, console: &Path) -> Vec<String> {
    // Without `iommu=pt` the kernel's own driver would pay for mappings that this comparison is not
    // about.
    let line = format!("console=ttyS0 loglevel=5 intel_iommu=on iommu=pt panic=-1 job={job}");
    let text = "-nodefaults -no-user-config -display none -no-reboot -accel tcg,thread=multi -smp 2 -m 1G \
        -machine q35 -cpu max,la57=off -global ICH9-LPC.acpi-pci-hotplug-with-bridge-support=off -device intel-iommu,intremap=on";
    let mut arguments: Vec<String> = text.split_whitespace().map(str::to_owned).collect();
    let mut add = |name: &str, value: String| arguments.extend([name.to_owned(), value]);
    for (at, disk) in files.disks.iter().enumerate() {
        let disk = disk.display();
        // It stays when its controller is taken out.
        add(
            "-blockdev",
            format!(
                "driver=raw,node-name=disk{at},discard=unmap,file.driver=file,file.filename={disk}"
            ),
        );
        add("-device", format!("pcie-root-port,id=port{at},chassis={at},slot={at}"));
        let controller = controller(at);
        let pairs = controller.as_object().into_iter().flatten();
        let mut device = "nvme".to_owned();
        for (name, value) in pairs.filter(|(name, _)| *name != "driver") {
            match value.as_str() {
                Some(text) => device += &format!(",{name}={text}"),
                None => device += &format!(",{name}={value}"),
            }
        }
        add("-device", device);
    }
    add("-qmp", format!("unix:{},server=on,wait=off", control.display()));
    add("-serial", format!("file:{}", console.display()));
    add("-serial", "stdio".to_owned());
    add("-kernel", files.kernel.display().to_string());
    add("-initrd", files.initial.display().to_string());
    add("-append", line);
    arguments
}

/// The properties of a controller.
fn controller(at: usize) -> Value {
    json!({
        "driver": "nvme", "id": format!("nvme{at}"), "serial": format!("guest{at}"),
        "drive": format!("disk{at}"), "bus": format!("port{at}"),
        "logical_block_size": 4096, "physical_block_size": 4096,
    })
}

/// The meaning of a line: `None` for what is only shown, and the name of a check that failed as an
/// error.
fn parse(line: &str) -> Option<Result<GuestLine, String>> {
    let (word, rest) = line.strip_prefix('@')?.split_once(' ').unwrap_or((line.get(1..)?, ""));
    let (first, second) = rest.split_once(' ').unwrap_or((rest, ""));
    Some(Ok(match word {
        "ok" => GuestLine::Passed(rest.to_owned()),
        "fail" => return Some(Err(rest.to_owned())),
        "value" => GuestLine::Value(first.to_owned(), second.to_owned()),
        "want" => GuestLine::Wants(rest.to_owned()),
        "durable" => GuestLine::Durable(first.parse().ok()?, second.parse().ok()?),
        "end" => GuestLine::End,
        _ => return None,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_the_guest_are_told_apart() {
        assert_eq!(parse("@ok a check"), Some(Ok(GuestLine::Passed("a check".to_owned()))));
        assert_eq!(parse("@fail a check"), Some(Err("a check".to_owned())));
        assert_eq!(parse("@durable 1 20"), Some(Ok(GuestLine::Durable(1, 20))));
        let value = GuestLine::Value("rate".to_owned(), "1 2".to_owned());
        assert_eq!(parse("@value rate 1 2"), Some(Ok(value)));
        assert_eq!(parse("@end"), Some(Ok(GuestLine::End)));
        for line in ["", "# text", "@", "@durable x 1", "@unknown"] {
            assert_eq!(parse(line), None, "{line}");
        }
    }
}
