//! `defuse top --cast`: the full-screen view as a recording, asciicast v2, without a terminal.

use std::cell::RefCell;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;
use std::rc::Rc;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use ratatui::backend::CrosstermBackend;
use ratatui::layout::Rect;
use ratatui::{Frame, Terminal, TerminalOptions, Viewport};
use serde_json::json;

/// The size of the recorded screen.
const SCREEN: Rect = Rect { x: 0, y: 0, width: 132, height: 24 };

/// A screen that is recorded.
pub struct CastRecorder<W: Write> {
    to: W,
    begun: Instant,
    terminal: Terminal<CrosstermBackend<DrawnBytes>>,
    drawn: DrawnBytes,
}

/// The bytes for the terminal that were not recorded yet.
#[derive(Clone, Default)]
struct DrawnBytes(Rc<RefCell<Vec<u8>>>);

impl Write for DrawnBytes {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.borrow_mut().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl CastRecorder<BufWriter<File>> {
    /// Begins a recording in the new file `path`.
    pub fn create(path: &Path) -> io::Result<Self> {
        CastRecorder::new(BufWriter::new(File::create_new(path)?))
    }
}

impl<W: Write> CastRecorder<W> {
    fn new(mut to: W) -> io::Result<Self> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let head = json!({
            "version": 2, "width": SCREEN.width, "height": SCREEN.height, "timestamp": now,
            "title": "defuse top", "env": {"TERM": "xterm-256color"},
        });
        writeln!(to, "{head}")?;
        let drawn = DrawnBytes::default();
        let options = TerminalOptions { viewport: Viewport::Fixed(SCREEN) };
        let terminal = Terminal::with_options(CrosstermBackend::new(drawn.clone()), options)?;
        Ok(CastRecorder { to, begun: Instant::now(), terminal, drawn })
    }

    /// Draws one frame, and records what a terminal would have received.
    pub fn draw(&mut self, draw: impl FnOnce(&mut Frame)) -> io::Result<()> {
        self.terminal.draw(draw)?;
        let bytes = std::mem::take(&mut *self.drawn.0.borrow_mut());
        let seconds = self.begun.elapsed().as_micros() as f64 / 1e6;
        let event = json!([seconds, "o", String::from_utf8_lossy(&bytes)]);
        writeln!(self.to, "{event}")?;
        self.to.flush()
    }
}

#[cfg(test)]
mod tests {
    use ratatui::widgets::Paragraph;

    use super::*;

    #[test]
    fn each_frame_is_an_event_with_what_has_changed() {
        let mut recorder = CastRecorder::new(Vec::new()).unwrap();
        for text in ["first line", "first word"] {
            recorder.draw(|frame| frame.render_widget(Paragraph::new(text), frame.area())).unwrap();
        }
        let text = String::from_utf8(recorder.to).unwrap();
        let lines: Vec<serde_json::Value> =
            text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!((&lines[0]["version"], &lines[0]["width"]), (&json!(2), &json!(132)));
        let events: Vec<&str> = lines[1..].iter().map(|event| event[2].as_str().unwrap()).collect();
        assert_eq!(events.len(), 2, "{text}");
        assert!(events[0].contains("first") && events[0].contains("line"), "{text}");
        assert!(events[1].contains("word") && !events[1].contains("first"), "{text}");
        assert!(lines[1][0].as_f64() <= lines[2][0].as_f64(), "{text}");
    }
}
