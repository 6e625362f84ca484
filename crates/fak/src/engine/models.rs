//! What an engine serves: its models as cards, and what a name among them stands for.
//!
//! Invariant: a name stands for what the cards prove, and for nothing by its place in the list.
//! vLLM lists a base model once under each served name, with `parent: null` and one `root`, and
//! each adapter with its base as `parent` and its path as `root` (0.32.0, observed).

use std::sync::Arc;

/// A served model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Model {
    /// Its name.
    pub id: Arc<str>,
    /// Where its weights were loaded from, if told.
    pub root: Option<Arc<str>>,
    /// The model that an adapter sits on.
    pub parent: Option<Arc<str>>,
    /// Prompt and output tokens together, if told.
    pub tokens_max: Option<u32>,
}

impl Model {
    /// A base model of which nothing but its name is told.
    #[must_use]
    pub fn base(id: &str) -> Self {
        Self { id: id.into(), root: None, parent: None, tokens_max: None }
    }

    /// An adapter on `parent`.
    #[must_use]
    pub fn adapter(id: &str, parent: &str) -> Self {
        Self { parent: Some(parent.into()), ..Self::base(id) }
    }
}

/// What a request's model is to the engine's cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Named {
    /// The base model.
    Base,
    /// One adapter.
    Adapter,
    /// The cards do not tell.
    Unclear,
}

/// All that an engine serves, in its order. Cheap to clone.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Models(Arc<[Model]>);

impl Models {
    /// The cards.
    pub fn iter(&self) -> std::slice::Iter<'_, Model> {
        self.0.iter()
    }

    /// The names.
    pub fn names(&self) -> impl Iterator<Item = &Arc<str>> {
        self.0.iter().map(|model| &model.id)
    }

    /// Whether nothing was told.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether one of them has this name.
    #[must_use]
    pub fn has(&self, name: &str) -> bool {
        self.names().any(|id| **id == *name)
    }

    /// What `name` stands for; without a name the engine takes its base model.
    #[must_use]
    pub fn named(&self, name: Option<&str>) -> Named {
        let Some(name) = name else { return Named::Base };
        let mut cards = self.0.iter().filter(|model| *model.id == *name);
        match (cards.next(), cards.next()) {
            (Some(Model { parent: Some(parent), .. }), None) => {
                if self.is_base(parent) {
                    Named::Adapter
                } else {
                    Named::Unclear
                }
            }
            (Some(_), None) if self.is_base(name) => Named::Base,
            _ => Named::Unclear,
        }
    }

    /// Whether `name` is the base model: the only card without a parent, or one of several that
    /// all have the same root.
    #[must_use]
    pub fn is_base(&self, name: &str) -> bool {
        let mut bases = self.0.iter().filter(|model| model.parent.is_none());
        let Some(first) = bases.next() else { return false };
        let is_same = |other: &Model| first.root.is_some() && other.root == first.root;
        let is_one = bases.all(is_same);
        is_one && self.0.iter().any(|model| model.parent.is_none() && *model.id == *name)
    }

    /// A name of the base model; where the cards do not tell, the first of all.
    #[must_use]
    pub fn base(&self) -> Option<&Arc<str>> {
        self.names().find(|name| self.is_base(name)).or_else(|| self.names().next())
    }
}

impl FromIterator<Model> for Models {
    fn from_iter<I: IntoIterator<Item = Model>>(models: I) -> Self {
        Self(models.into_iter().collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cards(cards: &[(&str, Option<&str>, Option<&str>)]) -> Models {
        let card = |(id, root, parent): &(&str, Option<&str>, Option<&str>)| Model {
            root: root.map(Arc::from),
            parent: parent.map(Arc::from),
            ..Model::base(id)
        };
        cards.iter().map(card).collect()
    }

    #[test]
    fn the_base_is_the_card_without_a_parent_wherever_it_stands() {
        let sorted = cards(&[("ad1", Some("/ad1"), Some("mock")), ("mock", Some("/m"), None)]);
        assert_eq!(sorted.named(Some("ad1")), Named::Adapter);
        assert_eq!(sorted.named(Some("mock")), Named::Base);
        assert_eq!(sorted.named(None), Named::Base);
        assert_eq!(sorted.base().map(|name| &**name), Some("mock"));
        assert_eq!(sorted.named(Some("other")), Named::Unclear);
    }

    #[test]
    fn a_second_name_of_the_base_has_no_parent_and_the_same_root() {
        let names = cards(&[("tiny", Some("/m"), None), ("gpt-4o", Some("/m"), None)]);
        assert_eq!(names.named(Some("gpt-4o")), Named::Base);
        assert_eq!(names.named(Some("tiny")), Named::Base);
    }

    #[test]
    fn cards_that_do_not_tell_the_base_tell_nothing() {
        for unclear in [
            // An adapter of an engine that names no parent.
            cards(&[("m", Some("/m"), None), ("x", Some("/x"), None)]),
            cards(&[("m", None, None), ("x", None, None)]),
            cards(&[("m", Some("/m"), None), ("x", None, None)]),
            // One name twice.
            cards(&[("x", Some("/m"), None), ("x", Some("/x"), Some("x"))]),
            // The parent is none of the base's names.
            cards(&[("m", Some("/m"), None), ("x", Some("/x"), Some("gone"))]),
            cards(&[("x", Some("/x"), Some("m"))]),
            Models::default(),
        ] {
            assert_eq!(unclear.named(Some("x")), Named::Unclear, "{unclear:?}");
        }
    }
}
