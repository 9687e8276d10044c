"""SGLang: releases as locked and as installed, and what a version is."""
