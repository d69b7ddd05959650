//! The number of requests to a mount by operation, from `defuse stat --json`.

use std::collections::BTreeMap;

use anyhow::{Context, Result};

/// Counts of requests.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RequestCounts {
    /// By the name of the operation.
    pub counts: BTreeMap<String, u64>,
}

impl RequestCounts {
    /// Parses the output of `defuse stat --json`.
    pub fn parse(json: &str) -> Result<RequestCounts> {
        let value: serde_json::Value = serde_json::from_str(json).context("defuse stat --json")?;
        let ops = value["ops"].as_array().context("defuse stat --json has no `ops`")?;
        let mut counts = BTreeMap::new();
        for row in ops.iter().filter(|row| row["stage"] == "user") {
            let (op, count) = (row["op"].as_str(), row["count"].as_u64());
            let (op, count) = op.zip(count).context("a row of `ops` has no `op` or `count`")?;
            counts.insert(op.to_owned(), count);
        }
        Ok(RequestCounts { counts })
    }

    /// The requests since `earlier`.
    pub fn changes_since(&self, earlier: &RequestCounts) -> RequestCounts {
        let new = |(op, count): (&String, &u64)| {
            let before = earlier.counts.get(op).copied().unwrap_or(0);
            (*count > before).then(|| (op.clone(), count - before))
        };
        RequestCounts { counts: self.counts.iter().filter_map(new).collect() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_new_requests_are_counted() {
        let stat = |reads: u64| {
            let json = r#"{"ops":[{"op":"READ","stage":"user","count":COUNT},
                {"op":"READ","stage":"pending","count":9},{"op":"OPEN","stage":"user","count":1}]}"#;
            RequestCounts::parse(&json.replace("COUNT", &reads.to_string())).unwrap()
        };
        assert_eq!(
            stat(5).changes_since(&stat(2)).counts,
            BTreeMap::from([("READ".to_owned(), 3)])
        );
        assert!(RequestCounts::parse("{}").is_err());
    }
}
