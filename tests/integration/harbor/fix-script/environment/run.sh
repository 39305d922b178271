#!/bin/sh
eco ok
