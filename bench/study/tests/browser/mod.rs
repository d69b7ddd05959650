//! Checks a report in a real browser: everything is drawn, there are no errors, and it fits on a
//! telephone.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

/// Shows the report in a frame of a telephone's width, and records what is visible. The frame
/// belongs to the page, so that the page may inspect it.
const PROBE: &str = r#"
addEventListener("load", () => {
  const page = document.getElementById("report").contentDocument;
  const size = e => { const r = e.getBoundingClientRect(); return [Math.round(r.width), Math.round(r.height)]; };
  const shown = [...page.querySelectorAll("svg")].filter(e => !e.closest("details:not([open])"));
  const flat = shown.filter(e => size(e)[0] < 8 || size(e)[1] < 8);
  const bars = shown.flatMap(e => [...e.querySelectorAll("rect")]);
  const thin = bars.filter(e => e.getBoundingClientRect().height < 1);
  const small = [...page.querySelectorAll("p,span,li,td,dd,summary")]
    .filter(e => e.textContent.trim() && parseFloat(getComputedStyle(e).fontSize) < 11);
  const text = getComputedStyle(page.body).color, back = getComputedStyle(page.body).backgroundColor;
  document.getElementById("seen").textContent = JSON.stringify({
    width: page.documentElement.clientWidth, scroll: page.documentElement.scrollWidth, plots: shown.length,
    flat: flat.length, bars: bars.length, thin: thin.length, small: small.length, sections: page.querySelectorAll("section h2").length,
    wide: [...page.querySelectorAll("body *")].filter(e => e.getBoundingClientRect().right > page.documentElement.clientWidth + 0.5 && !e.closest(".wide table") && !e.closest("details:not([open])")).slice(0,3).map(e => e.outerHTML.slice(0,150)), text, back
  });
  console.log("looked at");
});
"#;

/// The minimum contents of a report.
pub struct ReportMinimum {
    pub plots: u64,
    pub bars: u64,
    pub sections: u64,
}

/// Checks a report in light and dark mode. Prints a message and passes if there is no browser.
pub fn draws_everything_within_360_pixels(html: &str, least: &ReportMinimum) {
    let Some(browser) = find_browser() else {
        println!("skipped: there is no chromium");
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    let html = html.replace('&', "&amp;").replace('"', "&quot;");
    let page = format!(
        "<!doctype html><meta charset=utf-8><link rel=icon href=data:,><iframe id=report width=360 height=800 \
         style=\"border:0\" srcdoc=\"{html}\"></iframe><pre id=seen></pre><script>{PROBE}</script>"
    );
    let file = dir.path().join("page.html");
    fs::write(&file, page).unwrap();
    let mut grounds = Vec::new();
    for dark in [false, true] {
        let scheme = if dark {
            "--blink-settings=preferredColorScheme=0"
        } else {
            "--blink-settings=preferredColorScheme=1"
        };
        let (dom, log) = look(browser, dir.path(), &file, &[scheme]);
        let console: Vec<&str> = log.lines().filter(|line| line.contains("CONSOLE")).collect();
        assert!(
            console.iter().any(|line| line.contains("looked at")),
            "the console is not seen:\n{log}"
        );
        assert!(console.iter().all(|line| line.contains("looked at")), "{console:?}");
        let seen = dom.split_once("<pre id=\"seen\">").unwrap().1.split_once("</pre>").unwrap().0;
        let seen: serde_json::Value = serde_json::from_str(&seen.replace("&quot;", "\"")).unwrap();
        let figure = |name: &str| seen[name].as_u64().unwrap();
        assert!(
            figure("width") <= 360 && figure("scroll") <= figure("width"),
            "it scrolls sideways: {seen}"
        );
        assert!(figure("plots") >= least.plots && figure("bars") >= least.bars, "{seen}");
        assert_eq!((figure("flat"), figure("thin"), figure("small")), (0, 0, 0), "{seen}");
        assert_eq!(figure("sections"), least.sections);
        let (text, back) = (luminance(&seen["text"]), luminance(&seen["back"]));
        let contrast = (text.max(back) + 0.05) / (text.min(back) + 0.05);
        assert!(contrast >= 7.0, "contrast {contrast}: {seen}");
        grounds.push(back);
    }
    assert!(grounds[0] > 0.8 && grounds[1] < 0.1, "light and dark: {grounds:?}");
}

fn find_browser() -> Option<&'static str> {
    let there = |name: &&str| {
        Command::new(name)
            .arg("--version")
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status()
            .is_ok()
    };
    ["chromium", "chromium-browser", "google-chrome"].into_iter().find(there)
}

fn look(browser: &str, dir: &Path, file: &Path, more: &[&str]) -> (String, String) {
    let output = Command::new(browser)
        .args([
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-quic",
            "--no-first-run",
            "--disable-sync",
        ])
        .args([
            "--disable-background-networking",
            "--disable-component-update",
            "--enable-logging=stderr",
        ])
        .args(["--virtual-time-budget=20000", "--dump-dom", "--window-size=1000,900"])
        .args(more)
        .arg(format!("--user-data-dir={}", dir.join("profile").display()))
        .arg(format!("file://{}", file.display()))
        .env("HOME", dir)
        .stdin(Stdio::null())
        .output()
        .unwrap();
    (
        String::from_utf8_lossy(&output.stdout).into_owned(),
        String::from_utf8_lossy(&output.stderr).into_owned(),
    )
}

/// Relative luminance of `rgb(r, g, b)`, as WCAG defines it.
fn luminance(color: &serde_json::Value) -> f64 {
    let digits = color.as_str().unwrap().trim_start_matches("rgb(").trim_end_matches(')');
    let channel = |text: &str| {
        let value = text.trim().parse::<f64>().unwrap() / 255.0;
        if value <= 0.04045 { value / 12.92 } else { ((value + 0.055) / 1.055).powf(2.4) }
    };
    let parts: Vec<f64> = digits.split(',').map(channel).collect();
    0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]
}
