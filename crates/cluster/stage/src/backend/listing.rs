//! Listings of the store with the staged names among them.
//!
//! A page ends with the last name of the store's page, or with the last staged name of an answer if the leader has more: the store's page is
//! asked for again then, and what was listed is left out.

use super::{StagedBackend, known_as, raw_of};
use crate::message::{Answer, KnownName, NamesBelow, StageCall, StageReply, unexpected};
use bytes::Bytes;
use serde::{Deserialize, Serialize};
use spurline_object_store::{RawObject, RawPage, RequestFailure};
use spurline_types::ErrorKind;
use std::collections::{BTreeMap, BTreeSet};

/// The place in a merged listing.
#[derive(Default, Serialize, Deserialize)]
struct MergedPlace {
    /// The store's token of the page.
    token: Option<String>,
    /// The last name listed.
    after: String,
}

impl MergedPlace {
    fn from_token(token: Option<&str>) -> Answer<MergedPlace> {
        let Some(token) = token else { return Ok(MergedPlace::default()) };
        serde_json::from_str(token)
            .map_err(|error| RequestFailure::fatal(ErrorKind::Invalid, format!("a token of a listing: {error}")))
    }

    fn to_token(&self) -> Answer<String> {
        serde_json::to_string(self)
            .map_err(|error| RequestFailure::fatal(ErrorKind::Invalid, format!("a token of a listing: {error}")))
    }
}

impl StagedBackend {
    /// A page of the store's `list` and of the staged names.
    pub(super) async fn list_merged(
        &self,
        prefix: &str,
        token: Option<&str>,
        is_folded: bool,
        list: impl AsyncFnOnce(Option<String>) -> Answer<RawPage>,
    ) -> Answer<RawPage> {
        if !self.stage.is_in_use()? {
            return list(token.map(str::to_owned)).await;
        }
        let place = MergedPlace::from_token(token)?;
        let NamesBelow { names: staged, has_more, is_object } =
            self.staged_below(prefix, &place.after, is_folded).await?;
        let is_of_group = is_object || self.is_scratch(prefix);
        let page = if is_of_group { RawPage::default() } else { list(place.token.clone()).await? };
        let last_staged = staged.last().map(|(name, _)| name.clone()).filter(|_| has_more);
        let last_stored = page.names().max().map(str::to_owned).filter(|_| page.next.is_some());
        let (until, token) = match (last_staged, last_stored) {
            (Some(staged), Some(stored)) if staged < stored => (Some(staged), place.token),
            (Some(staged), None) => (Some(staged), place.token),
            // An empty page before others: nothing is listed yet.
            (_, None) if page.next.is_some() => (Some(place.after.clone()), page.next.clone()),
            (_, stored) => (stored, page.next.clone()),
        };
        let next = until.clone().map(|after| MergedPlace { token, after }.to_token()).transpose()?;
        let mut merged = merge(page, staged, &place.after, until.as_deref());
        merged.next = next;
        Ok(merged)
    }

    async fn staged_below(&self, prefix: &str, after: &str, is_folded: bool) -> Answer<NamesBelow> {
        let call = StageCall::FindBelow { prefix: self.at(prefix), after: after.to_owned(), is_folded };
        match self.ask(call, Bytes::new()).await?.reply {
            StageReply::Names(names) => Ok(names),
            other => Err(unexpected(&other)),
        }
    }
}

/// The names behind `after` and up to `until`.
fn merge(page: RawPage, staged: Vec<(String, KnownName)>, after: &str, until: Option<&str>) -> RawPage {
    let is_in = |name: &str| (after.is_empty() || name > after) && until.is_none_or(|until| name <= until);
    let mut prefixes: BTreeSet<String> = page.prefixes.into_iter().filter(|name| is_in(name)).collect();
    let stored = page.objects.into_iter().filter(|object| is_in(&object.key));
    let mut objects: BTreeMap<String, RawObject> = stored.map(|object| (object.key.clone(), object)).collect();
    for (name, known) in staged.into_iter().filter(|(name, _)| is_in(name)) {
        match known {
            KnownName::Object(manifest) => drop(objects.insert(name, raw_of(&manifest))),
            KnownName::Removing => drop(objects.remove(&name)),
            KnownName::Folder => drop(prefixes.insert(name)),
            KnownName::Saved(saved) => {
                if let Some(object) = objects.remove(&name) {
                    objects.insert(name, known_as(object, &saved));
                }
            }
            KnownName::Unknown => {}
        }
    }
    RawPage { objects: objects.into_values().collect(), prefixes: prefixes.into_iter().collect(), next: None }
}

#[cfg(test)]
mod tests;
