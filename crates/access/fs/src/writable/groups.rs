//! The supplementary groups of a process, as the system shows them. A process of another process namespace has none
//! that can be seen.

/// The supplementary groups of the thread `pid`; none if it is gone or not visible.
pub(super) fn groups_of(pid: u32) -> Vec<u32> {
    if pid == 0 {
        return Vec::new();
    }
    let status = std::fs::read(format!("/proc/{pid}/status")).unwrap_or_default();
    parse_groups(&status)
}

fn parse_groups(status: &[u8]) -> Vec<u32> {
    let line = status.split(|byte| *byte == b'\n').find_map(|line| line.strip_prefix(b"Groups:"));
    let words = line.and_then(|line| std::str::from_utf8(line).ok()).unwrap_or_default().split_ascii_whitespace();
    words.filter_map(|word| word.parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_are_read_from_the_status() {
        assert_eq!(parse_groups(b"Name:\tx\nGid:\t0\t0\nGroups:\t4 27 1000 \nNStgid:\t1\n"), [4, 27, 1000]);
        assert!(parse_groups(b"Groups:\t\n").is_empty() && parse_groups(b"").is_empty());
        assert!(groups_of(0).is_empty() && groups_of(u32::MAX).is_empty());
    }
}
